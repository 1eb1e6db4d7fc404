"""Training on a loader whose next batch is fetched while a step computes."""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from shardwright.core.program import Program
from shardwright.errors import InputError, RunError
from shardwright.planner.lower import lower
from shardwright.planner.space.seeds import Seed, seed_strategy
from shardwright.runtime.capture import Captured, capture
from shardwright.runtime.executor import Executor, RunOptions
from shardwright.runtime.local_world import LocalWorld, run_locally
from shardwright.runtime.status import INTERRUPTION
from shardwright.runtime.train import LoopOptions, Step, train
from shardwright.verbs.resizing import resize
from tests.runtime.equivalence import captured_of

pytestmark = pytest.mark.torch
SGD = partial(torch.optim.SGD, lr=0.1)
Batch = dict[str, Tensor]


class Noisy(nn.Module):
    """Two layers with dropout between: what is drawn shows in the loss."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, width).double(), nn.Linear(width, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.dropout(self.up(x).tanh(), 0.5, self.training)
        return self.down(hidden).square().mean()


def noisy(width: int) -> tuple[nn.Module, Batch]:
    return Noisy(width), {"x": torch.zeros(8, 4, dtype=torch.float64)}


def made(
    *, plan: Seed | None = None, world: LocalWorld | None = None, width: int = 16, **options: Any
) -> Executor:
    """Return an executor of equal weights every time, for batches of 8 and others."""
    captured = captured_of(noisy, width)[2]
    torch.manual_seed(0)
    module = Noisy(width)
    strategy = seed_strategy(captured.graph, plan or Seed())

    def resized(batch: Any) -> tuple[Captured, Program]:
        again = capture(module, batch)
        return again, lower(again.graph, resize(captured.graph, again.graph, strategy))

    return Executor(
        captured,
        lower(captured.graph, strategy),
        module,
        optimizer=SGD,
        options=RunOptions(world=world, **options),
        resize=resized,
    )


def drawn(count: int, size: int = 8) -> Iterator[Batch]:
    """Yield batches from torch's global generator, as careless scripts do."""
    for _ in range(count):
        yield {"x": torch.randn(size, 4, dtype=torch.float64)}


def stepwise(loader: Any, executor: Executor) -> list[float]:
    return [float(executor.step(batch)) for batch in loader]


def streamed(loader: Any, executor: Executor, **options: Any) -> list[float]:
    return [float(step.loss) for step in executor.train(loader, **options)]


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_losses_are_those_of_single_steps_though_loader_and_dropout_share_a_generator(
    ahead: int,
) -> None:
    def busy() -> Iterator[Batch]:
        for _ in range(4):  # long enough to meet the masks of the step before
            yield {"x": torch.stack([torch.randn(4, dtype=torch.float64) for _ in range(2500)])[:8]}

    one, other = made(width=4096), made(width=4096)
    torch.manual_seed(5)
    expected = stepwise(busy(), one)
    after = torch.rand(())
    torch.manual_seed(5)
    assert streamed(busy(), other, ahead=ahead) == expected
    assert torch.rand(()) == after  # neither has moved the generator besides
    pairs = zip(one.full_parameters().values(), other.full_parameters().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_loader_may_write_its_batch_again() -> None:
    def reusing() -> Iterator[Batch]:
        x = torch.empty(8, 4, dtype=torch.float64)
        for number in range(4):
            yield {"x": x.fill_(number)}
            x.fill_(torch.nan)

    fresh = [{"x": torch.full((8, 4), float(n), dtype=torch.float64)} for n in range(4)]
    assert streamed(reusing(), made()) == stepwise(fresh, made())


def test_a_data_loader_with_a_short_last_batch_and_lists_of_tensors_trains() -> None:
    x = torch.randn(20, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(x), batch_size=8)
    assert [len(batch[0]) for batch in loader] == [8, 8, 4]
    assert streamed(loader, made()) == stepwise(loader, made())
    assert len(streamed(loader, made())) == 3


def test_two_ranks_train_as_one() -> None:
    batches = list(drawn(3))

    def rank(world: LocalWorld) -> list[float]:
        return streamed(batches, made(plan=Seed(data=2, zero=3), world=world))

    found, _ = run_locally(rank, 2)
    assert found[0] == found[1]
    assert len(found[0]) == 3


def test_the_next_batch_is_fetched_during_a_step_and_no_more_than_that() -> None:
    asked = [threading.Event() for _ in range(5)]

    def loader() -> Iterator[Batch]:
        for event, batch in zip(asked, drawn(5), strict=True):
            event.set()
            yield batch

    for step in made().train(loader()):
        if step.number < 5:
            assert asked[step.number].wait(30)  # without a word from the loop
        assert not any(event.is_set() for event in asked[step.number + 1 :])


def test_what_the_loader_raises_comes_with_the_number_of_the_batch_after_the_steps_before() -> None:
    def failing() -> Iterator[Batch]:
        yield from drawn(2)
        raise OSError("disk gone")

    executor = made()
    with pytest.raises(RunError, match=r"rank 0's raised OSError at batch 2 .*disk gone") as caught:
        streamed(failing(), executor)
    assert isinstance(caught.value.__cause__, OSError)
    assert executor.steps == 2
    assert streamed(drawn(1), executor)  # which goes on


class Ending(Dataset[Batch]):
    """Rows of zeros, but for the twentieth."""

    def __init__(self, how: Callable[[], None]) -> None:
        self.how = how

    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> Batch:
        if index == 20:
            self.how()
        return {"x": torch.zeros(4, dtype=torch.float64)}


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def broken() -> None:
    raise ValueError("row 20\nis broken")


def left() -> None:
    raise SystemExit("no more rows")


def given_up() -> None:
    raise GeneratorExit


class Mute(Exception):
    """An exception that cannot say what it is."""

    def __str__(self) -> str:
        raise LookupError("no words")


def muted() -> None:
    raise Mute


@pytest.mark.parametrize(
    ("how", "workers", "says"),
    [
        # What the worker had made when it was killed may not have been sent yet.
        (killed, 1, r"rank 0's worker process \d+ .* at batch ([012]) .*: resume from the last checkpoint"),
        (broken, 1, r"rank 0's raised ValueError at batch (2) .*: row 20 is broken, at test_stream.py:\d+; .*: resume"),
        (left, 0, r"rank 0's raised SystemExit at batch (2) .*: no more rows, at test_stream.py:\d+; .*: resume"),
        (given_up, 0, r"rank 0's raised GeneratorExit at batch (2) .*: no reason given, at test_stream.py:\d+; .*: resume"),
        (muted, 0, r"rank 0's raised Mute at batch (2) .*: no reason given, at test_stream.py:\d+; .*: resume"),
        (broken, 0, r"rank 0's raised ValueError at batch (2) .*: row 20 is broken, at test_stream.py:\d+; .*: resume"),
    ],
)  # fmt: skip
def test_a_worker_that_dies_or_raises_is_one_line_at_its_batch_wherever_the_step_is(
    how: Callable[[], None], workers: int, says: str
) -> None:
    executor = made()
    loader = DataLoader(Ending(how), batch_size=8, num_workers=workers, timeout=workers)

    def steps() -> None:
        for _ in executor.train(loader):
            time.sleep(0.1 * workers)  # the worker dies meanwhile

    with pytest.raises(RunError, match=says) as caught:
        steps()
    found = re.search(says, str(caught.value))
    assert found is not None
    assert "\n" not in str(caught.value)
    assert executor.steps == int(found[1])


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        (object(), r"a sequence of tensors or a tensor, not object; .*\['x'\]"),
        ("cuda", "a sequence of tensors or a tensor, not str"),
        (["text"], "'x' must be a tensor, not str"),
        ([3], "'x' must be a tensor, not int"),
        ({"x": None}, "'x' is missing"),
        (torch.ones(()), r"'x' must have the global shape \(8, 4\) .*, not \(\)"),
        ({"y": torch.ones(8, 4)}, "'x' is missing"),
        (
            torch.ones(8, 4, dtype=torch.complex64),
            "'x' must be torch.float64, .* not torch.complex64",
        ),
    ],
)
def test_what_is_no_batch_of_the_plan_is_refused(batch: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        list(made().train(iter([batch])))


def test_a_tensor_alone_is_a_batch_of_one_entry() -> None:
    ones = torch.ones(8, 4, dtype=torch.float64)
    losses = [[step.loss for step in made().train([one])] for one in (ones, {"x": ones})]
    assert losses[0] == losses[1]


class Unopened(list[Batch]):
    """A loader that has nothing to iterate."""

    def __iter__(self) -> Iterator[Batch]:
        raise OSError("no such folder")


def test_a_loader_that_cannot_be_begun_says_so_at_its_first_batch() -> None:
    with pytest.raises(
        RunError, match=r"raised OSError at batch 0 .*: no such folder, at test_stream"
    ):
        streamed(Unopened(), made())


def test_a_batch_that_does_not_fit_is_refused_as_step_refuses_it() -> None:
    for wrong in ({"y": torch.zeros(8, 4)}, {"x": torch.zeros(8, 5)}):
        with pytest.raises(InputError) as expected:
            made().step(wrong)
        with pytest.raises(InputError) as found:
            streamed([wrong], made())
        assert str(found.value) == str(expected.value)
    with pytest.raises(InputError, match="iterable of batches"):
        made().train(3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="not -1"):
        made().train([], ahead=-1)


class Closing:
    """A loader whose iterators say when they are closed."""

    def __init__(self) -> None:
        self.closed = 0

    def __iter__(self) -> Iterator[Batch]:
        try:
            yield from drawn(100)
        finally:
            self.closed += 1


class Unclosable:
    """A loader whose iterators cannot be closed."""

    def __iter__(self) -> Iterator[Batch]:
        try:
            yield from drawn(9)
        finally:
            raise OSError("still locked")


def two_steps(executor: Executor, loader: Any, ahead: int) -> None:
    for step in executor.train(loader, ahead=ahead):
        if step.number == 2:
            break


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_loader_that_cannot_be_closed_is_told_of_and_harms_nothing(ahead: int) -> None:
    executor = made()
    says = r"raised OSError when it was closed .*: still locked, at test_stream.py:\d+; what"
    with pytest.warns(RuntimeWarning, match=says):
        two_steps(executor, Unclosable(), ahead)
    assert executor.steps == 2
    assert not input_threads()


def input_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "input"]


@pytest.mark.parametrize("ahead", [0, 1])
def test_leaving_the_loop_ends_the_thread_and_closes_the_iterator(ahead: int) -> None:
    loader, executor = Closing(), made()
    for step in executor.train(loader, ahead=ahead):
        if step.number == 2:
            break
    del step
    gc.collect()
    assert loader.closed == 1
    assert not input_threads()
    with pytest.raises(ZeroDivisionError):
        [1 / 0 for _ in executor.train(loader, ahead=ahead)]
    gc.collect()
    assert loader.closed == 2
    assert not input_threads()


def test_an_iterator_of_the_users_own_stays_open() -> None:
    own, executor = drawn(9), made()
    for _ in executor.train(own, ahead=0):
        break
    assert executor.steps + len(streamed(own, executor)) == 9


@pytest.fixture
def unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has asked to stop, and what a test asks is forgotten behind it."""
    monkeypatch.setattr(INTERRUPTION, "_is_asked", False)


@pytest.mark.usefixtures("unasked")
def test_training_ends_after_the_step_in_which_somebody_asked_to_stop() -> None:
    executor = made()
    for step in executor.train(drawn(9)):
        assert step.number < 4
        if step.number == 2:
            INTERRUPTION.ask()
    assert executor.interrupted
    assert executor.steps == 3
    assert not input_threads()


def test_ctrl_c_interrupts_the_wait_for_a_batch() -> None:
    """Dropout and a loader take turns, so the signal may come in the step before the wait."""

    def slow() -> Iterator[Batch]:
        yield from drawn(1)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)
        yield from drawn(1)

    executor = made()
    with pytest.raises(KeyboardInterrupt):
        streamed(slow(), executor)
    assert executor.steps < 2
    gc.collect()
    assert not input_threads()


def test_the_wait_for_input_is_told_step_by_step() -> None:
    def slow() -> Iterator[Batch]:
        for batch in drawn(3):
            time.sleep(0.02)
            yield batch

    assert all(step.input_seconds >= 0.02 for step in made().train(slow(), ahead=0))
    waits = [step.input_seconds for step in made().train(list(drawn(3)))]
    assert len(waits) == 3
    assert min(waits) >= 0


def test_evaluation_and_outputs_go_on_beside_it() -> None:
    executor, held_out = made(), next(drawn(1))
    seen = [(float(executor.evaluate(held_out)), step.outputs) for step in executor.train(drawn(2))]
    assert seen[0][0] != seen[1][0]
    assert seen[0][1] == {}


@pytest.mark.usefixtures("unasked")
def test_the_loop_of_the_command_line_trains_on_as_many_batches_as_asked_or_says_they_ended() -> (
    None
):
    told: list[Step] = []
    options = LoopOptions(steps=3)
    end = train(made(), lambda first: drawn(9), options, lambda step: bool(told.append(step)))
    assert end.is_complete
    assert [step.number for step in told] == [1, 2, 3]
    assert all(step.seconds > 0 and step.input_seconds >= 0 for step in told)
    with pytest.raises(InputError, match="ended after 2 of 3; ask for fewer steps"):
        train(made(), lambda first: drawn(2), options, lambda step: False)
    stopped = train(made(), lambda first: drawn(9), options, lambda step: step.number == 1)
    assert not stopped.is_complete
    profiled = LoopOptions(steps=2, profiles=True)  # a further step, of data that has ended
    assert train(made(), lambda first: drawn(2), profiled, lambda step: False).timeline


def bad(executor: Executor) -> Callable[[float], float]:
    return lambda fill: float(executor.step({"x": torch.full((8, 4), fill, dtype=torch.float64)}))


def test_a_loss_that_is_not_finite_is_found_before_the_update_or_late_before_the_next_step() -> (
    None
):
    executor = made(check_finite=True)
    before = {name: t.clone() for name, t in executor.full_parameters().items()}
    with pytest.raises(RunError, match="it is nan in step 0; nothing was updated: lower"):
        bad(executor)(torch.nan)
    after = executor.full_parameters()
    assert all(torch.equal(before[name], after[name]) for name in before)
    late = made(check_finite=True)
    late.loss.is_late = True  # as where waiting would leave a GPU without work
    step = bad(late)
    step(1.0)
    step(torch.nan)
    with pytest.raises(RunError, match="it is nan in step 1; its gradients were used: go back"):
        step(1.0)
    assert late.steps == 2
