"""Which samples training reads, on which rank, and where it goes on after a checkpoint."""

from __future__ import annotations

import os
import pickle
import random
import signal
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from shardwright.caching import CachedFiles, MinIOCache
from shardwright.errors import CheckpointError, InputError, RunError, ShardwrightWarning
from shardwright.planner.lower import lower
from shardwright.planner.space.seeds import Seed, seed_strategy
from shardwright.runtime import inputs
from shardwright.runtime.byvalue import handed
from shardwright.runtime.executor import Executor, RunOptions
from shardwright.runtime.inputs import Needed
from shardwright.runtime.local_world import LocalWorld, run_locally
from shardwright.runtime.reading import Reader, as_read, is_shared_out, loader_of
from shardwright.runtime.standing import KEY
from shardwright.stalls import analyse
from tests.runtime.equivalence import captured_of
from tests.runtime.world import run_ranks

pytestmark = pytest.mark.torch
BATCH, SIZE = 8, 44


class Numbers(Dataset[Tensor]):
    """Samples that are their own index; says which were read."""

    def __init__(self, size: int = SIZE) -> None:
        self.size, self.read = size, list[int]()

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        self.read.append(index)
        return torch.tensor(index)


class Augmented(Dataset[dict[str, Tensor]]):
    """Samples that draw from every generator there is."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        noise = torch.randn(4, dtype=torch.float64) + random.random() + np.random.rand()
        return {"x": torch.full((4,), index / SIZE, dtype=torch.float64) + noise}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8).double(), nn.Linear(8, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh()).square().mean()


def net() -> tuple[nn.Module, dict[str, Tensor]]:
    return Net(), {"x": torch.zeros(BATCH, 4, dtype=torch.float64)}


def executor_of(plan: Seed | None = None, world: LocalWorld | None = None) -> Executor:
    captured = captured_of(net)[2]
    torch.manual_seed(0)
    module = Net()
    program = lower(captured.graph, seed_strategy(captured.graph, plan or Seed()))
    sgd = partial(torch.optim.SGD, lr=0.1)
    return Executor(captured, program, module, optimizer=sgd, options=RunOptions(world=world))


def one_pass(reader: Reader, loader: Any, needed: Needed | None = None) -> Iterator[list[int]]:
    """Walk over an epoch as training does, its place behind each batch that was trained on."""
    needed = needed or Needed(BATCH, None)
    walk = iter(reader.open(loader, needed, shard=None, resume=True))
    for batch in walk:
        is_part = isinstance(batch, inputs.Part)
        found: Any = batch.batch if is_part else batch
        yield [] if isinstance(found, dict) else found.tolist()
        reader.place = walk.place
    reader.place = walk.place


def flat(batches: Iterable[list[int]]) -> list[int]:
    return [index for batch in batches for index in batch]


def epochs_of(reader: Reader, loader: Any, count: int) -> list[list[int]]:
    return [flat(one_pass(reader, loader)) for _ in range(count)]


def test_each_epoch_is_a_permutation_the_one_that_torchs_distributed_sampler_draws() -> None:
    data, reader = Numbers(), Reader(seed=7)
    theirs = DistributedSampler(data, num_replicas=1, rank=0, seed=7)
    for epoch, found in enumerate(epochs_of(reader, data, 3)):
        theirs.set_epoch(epoch)
        assert found == list(theirs)
    assert reader.place is not None
    assert reader.place.epochs == 3


def test_a_data_loader_keeps_its_batch_size_generator_workers_and_last_batch() -> None:
    draw = torch.Generator().manual_seed(3)
    loader = DataLoader(Numbers(), 10, shuffle=True, num_workers=2, drop_last=True, generator=draw)
    theirs = DistributedSampler(Numbers(), num_replicas=1, rank=0, seed=3)
    found = list(one_pass(Reader(seed=7), loader))
    assert [len(batch) for batch in found] == [10] * 4
    assert flat(found) == list(theirs)[:40]
    in_order = DataLoader(Numbers(), 10)
    assert flat(one_pass(Reader(seed=7), in_order)) == list(range(SIZE))


def test_what_a_plan_measures_are_the_batches_that_a_rank_reads() -> None:
    """Its augmentations too, whose seeding takes time; so of a data set that is no loader."""
    walk = iter(Reader(0).open(Augmented(), Needed(BATCH, None), shard=None, resume=True))
    for one, other in zip(as_read(Augmented(), BATCH, BATCH), walk, strict=True):
        assert one["x"].equal(other["x"])
    for rows in (4, 1):
        found = analyse(as_read(Augmented(), 4, rows), lambda batch: None, batches=8)
        assert (found.batch_samples, found.workers) == (rows, 0)
    stream = iter([1, 2])
    assert as_read(stream, BATCH, 1) is stream
    assert [is_shared_out(one) for one in (Augmented(), stream, [1, 2])] == [True, False, False]


def test_small_batches_travel_by_value_and_others_as_torch_has_them() -> None:
    every = [torch.randn(3, 4)[:, ::2], torch.randn(2).bfloat16(), torch.ones(3, dtype=torch.bool)]
    every += [torch.tensor(5), torch.empty(0, 2), torch.randn(2, dtype=torch.complex64)]
    batch = {"a": every[0], "rest": (every[1:], "word", 3)}
    sent = handed(batch)
    assert sent is not batch
    found = pickle.loads(pickle.dumps(sent))
    assert list(found) == ["a", "rest"]
    assert found["rest"][1:] == ("word", 3)
    for one, other in zip([found["a"], *found["rest"][0]], every, strict=True):
        assert one.dtype is other.dtype
        assert one.equal(other)
    found["a"].add_(1)  # it can be written
    shared = {"x": torch.zeros(2**14 + 1)}
    alone = [{"x": one} for one in (every[0].requires_grad_(), nn.Parameter(torch.ones(2)), "word")]
    for one in (shared, *alone):
        assert handed(one) is one


def test_a_rank_reads_its_own_samples_and_short_batches_whole() -> None:
    whole = list(one_pass(Reader(seed=1), Numbers()))
    for rows in ((0, 1, 2, 3), (1, 5), (7,), ()):
        data = Numbers()
        parts = list(one_pass(Reader(seed=1), data, Needed(BATCH, rows)))
        assert parts == [[batch[row] for row in rows] for batch in whole[:-1]] + [whole[-1]]
        assert data.read == flat(parts)


def restored(reader: Reader, seed: int = 0) -> Reader:
    """Return a reader of another process that loaded what this one's checkpoint holds."""
    other = Reader(seed)
    assert other.restore(reader.beside({"mine": 1}), Path()) == {"mine": 1}
    return other


@pytest.mark.parametrize("workers", [0, 2])
def test_a_reader_goes_on_where_another_stopped_whatever_part_of_a_batch_it_reads(
    workers: int,
) -> None:
    expected = epochs_of(Reader(seed=5), Numbers(), 3)
    for stop in (1, 4, 5, 6, 9, 12) if workers == 0 else (7,):
        loader = DataLoader(Numbers(), BATCH, shuffle=True, num_workers=workers)
        reader, seen = Reader(seed=5), list[list[int]]()
        while len(seen) < stop:
            for batch in one_pass(reader, loader):
                seen.append(batch)
                if len(seen) > stop:  # drawn, but its step was never taken
                    break
        trained, other = seen[:stop], restored(reader)
        assert other.place is not None
        rest: list[list[int]] = []
        while other.place is not None and other.place.epochs < 3:
            rest += one_pass(other, loader)
        assert flat(trained + rest) == flat(expected)


def test_leaving_a_pass_early_begins_the_next_epoch() -> None:
    reader, data = Reader(seed=5), Numbers()
    expected = epochs_of(Reader(seed=5), data, 2)
    for _ in one_pass(reader, data):
        if reader.place is not None:
            break
    assert flat(one_pass(reader, data)) == expected[1]


def test_another_data_set_than_the_checkpoints_is_refused_or_begun_anew() -> None:
    reader = Reader(seed=5)
    next(filter(lambda _: reader.place, one_pass(reader, Numbers())))
    smaller = restored(reader).open(Numbers(40), Needed(BATCH, None), shard=None, resume=True)
    with pytest.raises(InputError, match="stands behind 8 of 44 samples, but this data set has 40"):
        iter(smaller)
    with pytest.raises(InputError, match="place of a loader of samples, but this one is of batche"):
        next(one_pass(restored(reader), [1, 2]))
    anew = restored(reader).open(Numbers(40), Needed(BATCH, None), shard=None, resume=False)
    assert sorted(i for batch in anew for i in batch.tolist()) == list(range(40))


@pytest.mark.parametrize(
    "change",
    [
        {"of": "words"}, {"done": -8}, {"done": 45}, {"done": "8"}, {"done": 8.0}, {"size": None}, {"epoch": True},
        {"epoch": 2**63}, {"seed": 2**64}, {"seed": None}, {"odd": 1},
    ],
)  # fmt: skip
def test_a_place_where_no_loader_stands_is_refused_with_the_checkpoints_name(
    change: dict[str, Any],
) -> None:
    reader = Reader(seed=5)
    next(filter(lambda _: reader.place, one_pass(reader, Numbers())))
    extra = reader.beside({})
    extra[KEY] |= change
    with pytest.raises(CheckpointError, match=r"but a/step-1 not as .*; load it with"):
        Reader(0).restore(extra, Path("a/step-1"))
    with pytest.raises(CheckpointError, match="it has other fields"):
        Reader(0).restore({KEY: [1]}, Path("a/step-1"))


class Stateful:
    """A loader of its own, with the two methods that torchdata's StatefulDataLoader has."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Tensor]:
        while self.at < 6:
            self.at += 1
            yield torch.tensor([self.at])
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return vars(self)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_a_loaders_own_state_is_that_of_the_batch_that_was_trained_on() -> None:
    reader = Reader(seed=0)
    walk = one_pass(reader, Stateful())
    assert [next(walk) for _ in range(4)] == [[1], [2], [3], [4]]  # the last is drawn ahead
    assert list(one_pass(restored(reader), Stateful())) == [[4], [5], [6]]
    assert list(walk) == [[5], [6]]
    assert list(one_pass(restored(reader), Stateful())) == [[1], [2], [3], [4], [5], [6]]


def test_a_loader_without_state_is_drawn_to_where_it_was_with_a_warning() -> None:
    batches, reader = [torch.tensor([n]) for n in range(5)], Reader(seed=0)
    walk = one_pass(reader, batches)
    assert [next(walk) for _ in range(3)] == [[0], [1], [2]]
    with pytest.warns(ShardwrightWarning, match="first 2 batches are drawn and dropped"):
        assert list(one_pass(restored(reader), batches)) == [[2], [3], [4]]
    assert list(one_pass(restored(reader), iter(batches[4:]))) == [[4]]  # put there by who made it
    with (
        pytest.warns(ShardwrightWarning),
        pytest.raises(InputError, match="but this loader has 1; pass"),
    ):
        next(one_pass(restored(reader), batches[:1]))


def test_samplers_that_are_not_torchs_plain_ones_are_iterated_as_they_are() -> None:
    sampler = WeightedRandomSampler([1.0] * 4, 12, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(Numbers(4), 4, sampler=sampler)
    assert len(flat(one_pass(Reader(seed=0), loader, Needed(4, (0,))))) == 12


def test_a_sampler_that_took_ranks_apart_already_is_refused() -> None:
    sampler = DistributedSampler(Numbers(), num_replicas=2, rank=0)
    with pytest.raises(InputError, match="use shuffle=True and the global batch size"):
        list(one_pass(Reader(seed=0), DataLoader(Numbers(), 4, sampler=sampler)))


def test_a_collate_of_ones_own_gets_whole_batches_unless_it_is_said_to_do_with_parts() -> None:
    loader = DataLoader(Numbers(), BATCH, collate_fn=torch.stack)
    assert len(next(one_pass(Reader(seed=0), loader, Needed(BATCH, (1, 2))))) == BATCH
    forced = Reader(0).open(loader, Needed(BATCH, (1, 2)), shard=True, resume=True)
    assert next(iter(forced)).batch.tolist() == [1, 2]


def test_augmentations_depend_on_epoch_and_sample_alone_and_leave_generators_as_they_were() -> None:
    def drawn(rows: tuple[int, ...] | None, workers: int) -> list[Tensor]:
        loader = DataLoader(Augmented(), BATCH, shuffle=True, num_workers=workers)
        reader = Reader(seed=2)
        found: list[Tensor] = []
        for _ in range(2):
            walk = iter(reader.open(loader, Needed(BATCH, rows), shard=None, resume=True))
            for batch in walk:
                part: Any = batch.batch if isinstance(batch, inputs.Part) else batch
                found.append(part["x"])
            reader.place = walk.place
        return found

    np.random.seed(3)
    before = torch.get_rng_state(), random.getstate(), expected_draw()
    whole, parts, others = drawn(None, 0), drawn((2, 3), 0), drawn((2, 3), 2)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert before[2] == np.random.rand()
    for one, part, other in zip(whole, parts, others, strict=True):
        assert torch.equal(part, other)
        assert torch.equal(part, one if len(one) < BATCH else one[2:4])
    first = [x for batch in whole[:6] for x in batch.sum(1).tolist()]
    second = [x for batch in whole[6:] for x in batch.sum(1).tolist()]
    assert len({*first, *second}) == 2 * SIZE  # fresh in every epoch


def expected_draw() -> float:
    """Return what NumPy's generator gives next, without moving it."""
    state = np.random.get_state()
    found = np.random.rand()
    np.random.set_state(state)
    return found


def plainly(dataset: Dataset[Any], epochs: int) -> list[float]:
    """Train with plain PyTorch on whole batches, in DistributedSampler's order."""
    torch.manual_seed(0)
    module, sampler = Net(), DistributedSampler(dataset, num_replicas=1, rank=0, seed=0)
    optimizer, losses = torch.optim.SGD(module.parameters(), lr=0.1), []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for (x,) in DataLoader(dataset, BATCH, sampler=sampler, drop_last=True):
            loss = module(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    return losses


def test_ranks_that_read_their_shares_train_as_plain_pytorch_on_whole_batches() -> None:
    x = torch.randn(SIZE, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x)
    expected = plainly(data, 2)

    def rank(world: LocalWorld) -> list[float]:
        executor = executor_of(plan, world)
        loader = DataLoader(data, BATCH, shuffle=True, drop_last=True)
        return [float(step.loss) for _ in range(2) for step in executor.train(loader, ahead=0)]

    for plan in (Seed(data=2), Seed(data=4, zero=3), Seed(data=2, stages=2, num_microbatches=2)):
        found, _ = run_locally(rank, plan.data * plan.stages)
        assert all(losses == pytest.approx(expected, rel=1e-12) for losses in found)


def test_cached_files_are_a_data_set_to_train_on(tmp_path: Path) -> None:
    paths = [tmp_path / str(number) for number in range(16)]
    for number, path in enumerate(paths):
        path.write_bytes(np.full(4, number / 16).tobytes())
        os.utime(path, (0, 0))  # what was written within some milliseconds is not cached yet
    with MinIOCache(1 << 20) as cache:
        data = CachedFiles(paths, cache, as_sample)
        executor = executor_of()
        losses = [float(step.loss) for _ in range(2) for step in executor.train(data)]
        assert cache.state().items == 16
    assert executor.epochs == 2
    whole = torch.stack([as_sample(path.read_bytes())[0] for path in paths])
    assert losses == pytest.approx(plainly(TensorDataset(whole), 2), rel=1e-12)


def as_sample(data: bytes) -> tuple[Tensor]:
    return (torch.frombuffer(bytearray(data), dtype=torch.float64),)


def trained(plan: Seed, workers: int, folder: str, last: int, dies_at: int) -> list[float]:
    """Train to a step, saving after every second one, from the newest checkpoint if there is one; a rank may
    be killed after a step."""
    executor = executor_of(plan)
    loader = DataLoader(Augmented(), BATCH, shuffle=True, drop_last=True, num_workers=workers)
    if (Path(folder) / "latest").exists():
        assert executor.load(folder) == {"mine": "kept"}
    losses: list[float] = []
    while executor.steps < last:
        for step in executor.train(loader):
            losses.append(float(step.loss))
            if step.number == dies_at and executor.rank == plan.data - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if step.number % 2 == 0:
                executor.save(folder, {"mine": "kept"})
            if step.number == last:
                break
    return losses


@pytest.mark.ranks
@pytest.mark.parametrize(("ranks", "workers", "dies_at"), [(1, 0, 8), (2, 2, 3)])
def test_a_run_that_was_killed_goes_on_bit_for_bit_as_one_that_was_not(
    ranks: int, workers: int, dies_at: int, tmp_path: Path
) -> None:
    run: Callable[..., list[Any]] = partial(run_ranks, ranks, trained, Seed(data=ranks), workers)
    whole = run(str(tmp_path / "whole"), 12, 0)[0]
    with pytest.raises(RunError):
        run(str(tmp_path / "cut"), 12, dies_at)
    rest = run(str(tmp_path / "cut"), 12, 0)[0]
    assert rest == whole[-len(rest) :]
    assert len(rest) == 12 - (dies_at - 1) // 2 * 2
    # And so does another number of ranks, up to rounding; the checkpoint of step 12 ends its loop at once.
    other = run_ranks(3 - ranks, trained, Seed(data=3 - ranks), 0, str(tmp_path / "cut"), 15, 0)[0]
    longer = run(str(tmp_path / "whole"), 15, 0)[0]
    assert other == pytest.approx(longer, rel=1e-9)


def test_a_function_that_makes_no_loader_is_refused() -> None:
    """``run --loader`` would train on the example batch without a word."""
    with pytest.raises(InputError, match="function returned NoneType; it must return an iterable"):
        loader_of(lambda: None)
    with pytest.raises(InputError, match="makes one when called, not None; name one"):
        loader_of(None)
