"""Compressed means beside an emulator in NumPy; conservation; bytes; what is owed over time."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from shardwright.ddp import Compression, Compressor
from shardwright.ddp.hooks import Load, reshared, wire_bytes
from shardwright.ddp.methods import METHODS
from shardwright.errors import InputError
from shardwright.runtime.compression import (
    Sparse,
    _is_among_sorted,
    _merged_by_sorting,
    is_among,
    largest,
    merged,
    split,
)
from tests.ddp import emulator
from tests.ddp.local import averaged, copied, on_ranks

pytestmark = pytest.mark.torch
SHAPES = {"first.weight": (6, 10), "second.weight": (8, 6), "bias": (5,)}
STEPS = 4
FLAT = ("top-k", "gtop-k", "gtop-k-tree", "int8", "1-bit")
SPARSE = FLAT[:3]


def settings(method, **others):
    return Compression(**({"method": method, "density": 0.1, "dense_below": 8} | others))


def drawn(ranks, steps=STEPS, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [
        [
            {
                name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
                for name, shape in SHAPES.items()
            }
            for _ in range(ranks)
        ]
        for _ in range(steps)
    ]


def total(of):
    """Sum gradients of several ranks or steps, flat."""
    return {
        name: sum(one[name].double().reshape(-1) for one in of if one.get(name) is not None)
        for name in SHAPES
    }


def owed(compressors):
    zeros = {name: torch.zeros(math.prod(shape)) for name, shape in SHAPES.items()}
    return total(
        [zeros] + [{name: one.owed(name) for name in SHAPES} for one in compressors]
    )  # fmt: skip


def assert_conserved(inputs, means, compressors):
    ranks = len(compressors)
    given = total([one for step in inputs for one in step])
    applied = total([step[0] for step in means])
    left = owed(compressors)
    for name in SHAPES:
        back = ranks * applied[name] + left[name]
        torch.testing.assert_close(back, given[name], rtol=0, atol=1e-12 * ranks)


@pytest.mark.parametrize("ranks", range(2, 10))
@pytest.mark.parametrize("method", FLAT)
def test_means_and_residuals_are_the_emulators_and_nothing_is_lost(method, ranks):
    inputs = drawn(ranks, seed=ranks)
    chosen = settings(method)
    means, compressors, _ = averaged(chosen, inputs)
    assert_conserved(inputs, means, compressors)
    compressed = [name for name in SHAPES if name != "bias" or method in ("int8", "1-bit")]
    for name in compressed:
        residuals = [np.zeros(math.prod(SHAPES[name]))] * ranks
        for number, step in enumerate(inputs):
            given = [one[name].reshape(-1).numpy() + rest for one, rest in zip(step, residuals)]
            kept = max(1, int(0.1 * len(given[0])))
            mean, residuals = emulator.step(method, given, kept)
            for one in means[number]:
                np.testing.assert_allclose(one[name].reshape(-1).numpy(), mean, rtol=0, atol=1e-13)
        for compressor, rest in zip(compressors, residuals):
            np.testing.assert_allclose(compressor.owed(name).numpy(), rest, rtol=0, atol=1e-12)
    for one in means[-1][1:]:
        assert all(torch.equal(one[name], means[-1][0][name]) for name in SHAPES)


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_power_sgd_is_the_emulators_and_nothing_is_lost(ranks):
    inputs = drawn(ranks)
    names = ("first.weight", "second.weight")
    generator = torch.Generator().manual_seed(9)
    rights = {n: torch.randn(SHAPES[n][1], 1, generator=generator).double() for n in names}
    means, compressors, _ = averaged(settings("powersgd"), inputs, factors=copied(rights))
    assert_conserved(inputs, means, compressors)
    for name in names:
        right, residuals = rights[name].numpy(), [0.0] * ranks
        for number, step in enumerate(inputs):
            given = [one[name].numpy() + rest for one, rest in zip(step, residuals)]
            mean, residuals, right = emulator.power_sgd(given, right)
            np.testing.assert_allclose(means[number][0][name].numpy(), mean, rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", ["gtop-k", "gtop-k-tree"])
def test_the_papers_residual_loses_what_the_emulator_loses(method):
    ranks = 8
    inputs = drawn(ranks, steps=1)
    means, compressors, _ = averaged(settings(method, residual="paper", density=0.3), inputs)
    name = "first.weight"
    given = [one[name].reshape(-1).numpy() for one in inputs[0]]
    mean, residuals = emulator.step(method, given, 18, "paper")
    np.testing.assert_allclose(means[0][0][name].reshape(-1).numpy(), mean, rtol=0, atol=1e-13)
    for compressor, rest in zip(compressors, residuals):
        np.testing.assert_allclose(compressor.owed(name).numpy(), rest, rtol=0, atol=1e-13)
    lost = sum(given) - ranks * mean - sum(residuals)
    assert np.abs(lost).sum() > 0.01 * np.abs(sum(given)).sum()


@pytest.mark.parametrize("method", ["dense", *SPARSE])
def test_all_elements_kept_is_dense_to_the_last_bit(method):
    inputs = drawn(3, dtype=torch.float32)
    means, compressors, _ = averaged(settings(method, density=1.0), inputs)
    expected, _, _ = averaged(settings("dense"), inputs)
    assert all(torch.equal(a[n], b[n]) for a, b in zip(means[-1], expected[-1]) for n in SHAPES)
    assert all(one.owed(name) is None for one in compressors for name in SHAPES)


@pytest.mark.parametrize("method", ["bfloat16", "float16"])
def test_half_precision_owes_what_rounding_took(method):
    inputs = drawn(2, steps=3)
    means, compressors, _ = averaged(settings(method), inputs)
    applied, given = total([step[0] for step in means]), total([g for step in inputs for g in step])
    left = owed(compressors)
    for name in SHAPES:
        # What is rounded in the sum of halves is nobody's: two ranks, three steps, half a unit each.
        unit = 2.0 ** (-8 if method == "bfloat16" else -11)
        gap = (2 * applied[name] + left[name] - given[name]).abs().max()
        assert gap <= 3 * 4 * unit
        assert left[name].abs().max() > 0


@pytest.mark.parametrize("ranks", range(2, 10))
@pytest.mark.parametrize("method", FLAT)
def test_bytes_on_the_wire_are_those_of_the_table(method, ranks):
    names = ("first.weight", "second.weight")
    inputs = [[{name: one[name] for name in names} for one in drawn(ranks, 1)[0]]]
    _, _, traffic = averaged(settings(method), inputs)
    elements = [60, 48]
    load = Load(
        ranks=ranks,
        elements=sum(8 * math.ceil(n / 8) for n in elements) if method == "1-bit" else sum(elements),
        kept=sum(max(1, int(0.1 * n)) for n in elements),
        width=8,
        units=2,
    )  # fmt: skip
    by_rank = [0] * ranks
    gathered = 0
    for (rank, primitive, _), sent in traffic.items():
        if primitive == "all_gather":
            gathered = (ranks - 1) * sent.bytes
        else:
            by_rank[rank] += sent.bytes
    table = wire_bytes(method, load)
    if method in ("top-k", "int8", "1-bit"):
        assert gathered == table
    elif method == "gtop-k-tree":
        message = load.kept * 12
        assert sum(by_rank) == 2 * (ranks - 1) * message
        # Rank 0 sends as often as it receives, and is in every level.
        assert 2 * by_rank[0] == table
    else:
        # Of two that swap, each receives what the other sends; a rank that has another behind it,
        # and gets its selection too, sends as much as it receives.
        assert by_rank[0] == table - load.kept * 12 * bool(ranks & (ranks - 1))
    paper = {"top-k": 2 * load.kept * (ranks - 1), "gtop-k": 2 * load.kept * math.log2(ranks)}
    if method in paper and not ranks & (
        ranks - 1
    ):  # in numbers, where an index is as large as a value
        assert wire_bytes(method, Load(ranks, 108, load.kept)) == 4 * paper[method]


def test_power_sgd_sums_its_factors():
    inputs = [[{"first.weight": one["first.weight"]} for one in drawn(2, 1)[0]]]
    _, _, traffic = averaged(settings("powersgd"), inputs)
    assert traffic[0, "all_reduce", 2].bytes == (6 + 10) * 8
    assert wire_bytes("powersgd", Load(2, 60, factors=16, width=8)) == 16 * 8


@pytest.mark.parametrize("method", ["top-k", "gtop-k", "int8", "1-bit", "powersgd", "float16"])
def test_a_value_that_is_not_finite_reaches_all_and_changes_no_residual(method):
    inputs = drawn(3, steps=3)
    bad = [copied(one) for one in inputs[1]]
    bad[1]["second.weight"][0, 0] = math.inf
    means, compressors, _ = averaged(settings(method), [inputs[0], bad, inputs[2]])
    for one in means[1]:
        assert bool(one["first.weight"].isnan().all())
        assert bool(one["second.weight"].isnan().all())
    # As if the step had not been, but for what is drawn: the thresholds, and PowerSGD's factors.
    expected, others, _ = averaged(settings(method), [inputs[0], inputs[2]])
    torch.testing.assert_close(means[2], expected[1], rtol=0, atol=0)
    for one, other in zip(compressors, others):
        assert one.skipped == 1
        torch.testing.assert_close(one.owed("first.weight"), other.owed("first.weight"))


@pytest.mark.parametrize("method", [*FLAT, "powersgd", "bfloat16"])
def test_what_is_few_bytes_travels_with_what_comes_next_as_if_it_were_one_bucket(
    method, monkeypatch
):
    inputs = drawn(3, steps=2)
    inputs[1][1]["first.weight"][0, 0] = math.inf  # which what travels with it learns of, too
    chosen = settings(method, dense_below=8)
    expected, others, traffic = averaged(chosen, inputs)

    def in_buckets(wire):
        compressor, found, sent = Compressor(chosen, wire), [], []
        for step in inputs:
            gradients = copied(step[wire.rank])
            for name, one in gradients.items():
                sent.append(compressor.offer({name: one}, is_last=name == "bias"))
            found.append(gradients)
        return found, compressor, sent

    results, together = on_ranks(3, in_buckets)
    assert {key: one.messages for key, one in together.items()} == {
        key: one.messages for key, one in traffic.items()
    }
    for rank, (found, compressor, sent) in enumerate(results):
        assert sent == [False, False, True] * 2
        for name in SHAPES:
            means = [step[rank][name] for step in expected]
            for mean, one in zip(means, found):
                torch.testing.assert_close(one[name], mean, rtol=0, atol=1e-14, equal_nan=True)
            owes = [one.owed(name) for one in (compressor, others[rank])]
            assert owes == [None, None] or torch.allclose(*owes, rtol=0, atol=1e-14)
    monkeypatch.setattr("shardwright.ddp.compressor.AT_ONCE", 1)
    ((_, _, sent), *_), _ = on_ranks(3, in_buckets)
    assert all(sent)


@pytest.mark.parametrize("method", [*FLAT, "powersgd", "bfloat16"])
def test_means_are_written_into_the_memory_of_a_bucket_what_travels_whole_between_them(method):
    inputs = drawn(3, steps=3)
    chosen = settings(method, momentum=0.5 if method in SPARSE else 0.0)
    expected, others, _ = averaged(chosen, inputs)

    def in_one_memory(wire):
        compressor, found = Compressor(chosen, wire), []
        for step in inputs:
            names = ("first.weight", "bias", "second.weight")
            memory = torch.full((200,), 7.0, dtype=torch.float64)  # of others at both ends
            sizes = [11, *[step[wire.rank][name].numel() for name in names]]
            parts = memory.split([*sizes, 200 - sum(sizes)])
            gradients = {
                name: part.view(SHAPES[name]) for name, part in zip(names, parts[1:-1], strict=True)
            }
            for name, one in gradients.items():
                one.copy_(step[wire.rank][name])
            compressor.average(gradients)
            assert bool((torch.cat([parts[0], parts[-1]]) == 7).all())
            found.append(gradients)
        return found, compressor

    results, _ = on_ranks(3, in_one_memory)
    for rank, (found, compressor) in enumerate(results):
        for name in SHAPES:
            means = [step[rank][name] for step in expected]
            for mean, one in zip(means, found, strict=True):
                torch.testing.assert_close(one[name], mean, rtol=0, atol=1e-14)
            owes = [one.owed(name) for one in (compressor, others[rank])]
            assert owes == [None, None] or torch.allclose(*owes, rtol=0, atol=1e-14)


@pytest.mark.parametrize("merge", [merged, _merged_by_sorting])  # the latter is what GPUs do
@pytest.mark.parametrize("seed", range(20))
def test_selections_of_several_units_are_merged_each_by_itself(seed, merge):
    generator = np.random.default_rng(seed)
    counts, both = generator.integers(1, 6, 4).tolist(), []
    for _ in range(2):
        indices = [generator.permutation(8)[:count] for count in counts]
        values = generator.integers(-2, 3, sum(counts)).astype(np.float64)  # many are equal
        both.append(Sparse(torch.from_numpy(np.concatenate(indices)), torch.from_numpy(values)))
    kept, rests = merge(*both, counts)
    parts = zip(*(split(one, counts) for one in (*both, kept)), rests, counts, strict=True)
    for first, second, held, rest, count in parts:
        sums: dict[int, float] = {}
        for one in (first, second):
            for index, value in zip(one.indices.tolist(), one.values.tolist(), strict=True):
                sums[index] = sums.get(index, 0.0) + value
        order = sorted(sums, key=lambda index: (-abs(sums[index]), index))
        wanted = [(index, sums[index]) for index in order]
        found = zip(held.indices.tolist(), held.values.tolist(), strict=True)
        assert sorted(found) == sorted((wanted[:count] + [(0, 0.0)] * count)[:count])
        dropped = zip(rest.indices.tolist(), rest.values.tolist(), strict=True)
        assert sorted(dropped) == sorted(wanted[count:])


@pytest.mark.parametrize("among", [is_among, _is_among_sorted])
@pytest.mark.parametrize("seed", range(5))
def test_what_two_selections_both_have_is_found_unit_by_unit(seed, among):
    generator = np.random.default_rng(seed)
    counts = [3, 5, 1]
    one, other = (
        Sparse(torch.from_numpy(np.concatenate(parts)), torch.zeros(9))
        for parts in ([generator.permutation(6)[:count] for count in counts] for _ in range(2))
    )
    pairs = zip(split(one, counts), split(other, counts), strict=True)
    wanted = [index in set(b.indices.tolist()) for a, b in pairs for index in a.indices.tolist()]
    assert among(one, other, counts).tolist() == wanted
    assert any(wanted)
    assert not all(wanted)


@pytest.mark.parametrize("merge", [merged, _merged_by_sorting])
def test_what_is_no_number_is_kept_where_selections_are_merged(merge):
    one = Sparse(torch.tensor([5, 2, 0]), torch.tensor([1.0, math.nan, 3.0]))
    other = Sparse(torch.tensor([7, 5, 1]), torch.tensor([math.inf, 1.0, 9.0]))
    kept, _ = merge(one, other, [3])
    assert {2, 7, 1} == set(kept.indices.tolist())


def test_momentum_is_masked_where_something_was_sent():
    inputs = drawn(1, steps=3)
    means, (compressor,), _ = averaged(settings("top-k", momentum=0.5), inputs)
    velocity = rest = np.zeros(60)
    for number, (one,) in enumerate(inputs):
        velocity = 0.5 * velocity + one["first.weight"].reshape(-1).numpy()
        rest = rest + velocity
        sent = emulator.top(rest, 6)
        np.testing.assert_allclose(means[number][0]["first.weight"].reshape(-1), sent, atol=1e-13)
        rest, velocity = rest - sent, np.where(sent == 0, velocity, 0)
    np.testing.assert_allclose(compressor.owed("first.weight"), rest, atol=1e-13)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("method", SPARSE)
def test_unmasked_momentum_is_the_optimizers_applied_and_owed(method, ranks):
    inputs = drawn(ranks, steps=6, seed=ranks)
    chosen = settings(method, momentum=0.5, masked=False)
    means, compressors, _ = averaged(chosen, inputs)
    # What torch's SGD of the same momentum applies of the ranks' means, in all steps.
    theirs = {
        name: torch.nn.Parameter(torch.zeros(math.prod(SHAPES[name])).double()) for name in SHAPES
    }
    optimizer = torch.optim.SGD(theirs.values(), lr=1.0, momentum=0.5)
    for step in inputs:
        for name, one in theirs.items():
            one.grad = total(step)[name] / ranks
        optimizer.step()
    applied, left = total([step[0] for step in means]), owed(compressors)
    for name, one in theirs.items():
        back = applied[name] + left[name] / ranks
        torch.testing.assert_close(back, -one.detach(), rtol=0, atol=1e-12)
    assert max(float(one.abs().max()) for one in left.values()) > 0.1
    # A mask loses some of it.
    masked, others, _ = averaged(settings(method, momentum=0.5), inputs)
    name = "first.weight"
    back = total([step[0] for step in masked])[name] + owed(others)[name] / ranks
    assert float((back + theirs[name].detach()).abs().max()) > 0.1


def test_what_travels_whole_has_the_momentum_that_the_optimizer_has_not():
    inputs = drawn(2, steps=4)
    inputs[2][1]["bias"][0] = math.inf
    means, compressors, _ = averaged(settings("top-k", momentum=0.5, dense_steps=1), inputs)
    velocity = 0.0
    for number in (0, 1, 3):  # nothing is kept of what is not finite
        mine = sum(one["bias"].numpy() for one in inputs[number]) / 2
        velocity = 0.5 * velocity + mine
        for one in means[number]:
            np.testing.assert_allclose(one["bias"], velocity, atol=1e-13)
    assert all(not one["bias"].isfinite().all() for one in means[2])
    # What is compressed later goes on with the velocity of the steps before.
    first = [one["first.weight"].reshape(-1).numpy() for one in inputs[0]]
    begun, sent = sum(first) / 2, 0.0
    for one in inputs[1]:
        sent = sent + emulator.top(0.5 * begun + one["first.weight"].reshape(-1).numpy(), 6)
    found = means[1][0]["first.weight"].reshape(-1)
    np.testing.assert_allclose(found, sent / 2, atol=1e-13)
    states = [one.state_dict()["velocity"]["bias"] for one in compressors]
    assert torch.equal(*states)


def test_the_sum_of_clipped_gradients_is_no_longer_than_asked_for_ranks_that_agree():
    inputs = [[{name: 9 * one for name, one in drawn(1)[0][0].items()}] * 4]
    means, _, _ = averaged(settings("dense", clip=2.0), inputs)
    norm = math.sqrt(sum(float((4 * one).square().sum()) for one in means[0][0].values()))
    assert norm == pytest.approx(2.0 * math.sqrt(4), rel=1e-12)
    small = [[{name: 1e-3 * one for name, one in inputs[0][0].items()}] * 4]
    kept, _, _ = averaged(settings("dense", clip=2.0), small)
    torch.testing.assert_close(kept[0][0], small[0][0], rtol=1e-14, atol=0)


def test_halves_whose_squares_overflow_are_clipped_and_not_lost():
    inputs = [
        [
            {
                name: torch.full_like(one, 6e4, dtype=torch.float16)
                for name, one in drawn(1)[0][0].items()
            }
        ]
    ]
    means, _, _ = averaged(settings("dense", clip=2.0), inputs)
    norm = math.sqrt(sum(float(one.double().square().sum()) for one in means[0][0].values()))
    assert norm == pytest.approx(2.0, rel=2e-3)


def test_densities_warm_up_and_then_are_those_of_parameters():
    chosen = settings("top-k", warm_up=(0.5, 0.25), warm_up_steps=2, densities={"bias": 0.4})
    kept = [chosen.kept_at(step, "first.weight", 60) for step in range(6)]
    assert kept == [30, 30, 15, 15, 6, 6]
    assert chosen.kept_at(9, "bias", 5) == 2
    means, _, _ = averaged(chosen, drawn(1, steps=6))
    assert [int((one["first.weight"] != 0).sum()) for (one,) in means] == kept


@pytest.mark.parametrize("selection", ["threshold", "sample"])
def test_a_selection_by_threshold_sends_no_more_than_k_and_loses_nothing(selection):
    inputs = drawn(3, steps=6)
    chosen = settings("top-k", selection=selection, threshold_steps=3, scope="bucket")
    means, compressors, _ = averaged(chosen, inputs)
    assert_conserved(inputs, means, compressors)
    sent = [int((step[0]["first.weight"] != 0).sum()) for step in means]
    assert 0 < max(sent) <= 3 * (6 + 4)
    if selection == "threshold":
        (made,) = {at for one in compressors for at, _ in one.state_dict()["thresholds"].values()}
        assert made == 3


def test_a_dense_beginning_and_small_parameters_travel_as_they_are():
    inputs = drawn(3, steps=2)
    means, _, _ = averaged(settings("top-k", dense_steps=1), inputs)
    expected = total(inputs[0])
    for name in SHAPES:
        torch.testing.assert_close(means[0][0][name].reshape(-1), expected[name] / 3)
    torch.testing.assert_close(means[1][0]["bias"], total(inputs[1])["bias"] / 3)


@pytest.mark.parametrize("method", METHODS)
def test_a_gradient_without_elements_is_left_alone(method):
    inputs = drawn(2)
    for one in (one for step in inputs for one in step):
        one["none"], one["nobody"] = torch.zeros(0, 7).double(), torch.zeros(0).double()
    means, compressors, _ = averaged(settings(method, dense_below=0), inputs)
    assert all(step[0]["none"].shape == (0, 7) for step in means)
    if method not in ("bfloat16", "float16"):
        assert_conserved(inputs, means, compressors)


@pytest.mark.parametrize("whole", [{"dense_steps": 1}, {"dense_below": 1000}, {"method": "dense"}])
def test_what_travels_whole_and_is_not_finite_is_counted(whole):
    inputs = drawn(2, steps=1)
    inputs[0][1]["bias"][0] = math.inf
    _, compressors, _ = averaged(settings(**({"method": "top-k"} | whole)), inputs)
    assert [one.skipped for one in compressors] == [1, 1]


def test_narrow_gradients_have_wide_residuals():
    inputs = drawn(2, dtype=torch.bfloat16)
    means, compressors, _ = averaged(settings("top-k"), inputs)
    assert means[0][0]["first.weight"].dtype == torch.bfloat16
    assert {one.owed("first.weight").dtype for one in compressors} == {torch.float32}


def test_the_largest_are_those_of_a_sort_whatever_is_equal_zero_or_no_number():
    generator = torch.Generator().manual_seed(3)
    plain = torch.randn(500, generator=generator)
    cases = [plain, plain.double(), plain.round(), plain * (plain > 1.5), plain.new_ones(500)]
    cases += [plain.where(plain > bound, math.nan) for bound in (-2.0, 0.5)]
    # Of many a sample tells which the largest are among, or does not: where they lie close together.
    many = torch.randn(30_000, generator=generator)
    cases += [many, many.round(), many.where(many > -3.0, math.nan), many * (many > 2.0)]
    cases += [torch.cat([many.sort().values[:99] * 9, many])]
    for flat in cases:
        for count in (1, 7, 250, 500):
            found = largest(flat, count)
            assert len(found.unique()) == count
            expected = flat.abs().sort(descending=True).values[:count]  # NaN first
            torch.testing.assert_close(
                flat.abs()[found].sort(descending=True).values,
                expected, rtol=0, atol=0, equal_nan=True,
            )  # fmt: skip


def test_indices_are_exact_beyond_what_float32_counts():
    far = 2**24 + 3
    inputs = [[{"large": torch.zeros(2**24 + 8)} for _ in range(2)]]
    inputs[0][1]["large"][far] = 2.0
    means, _, _ = averaged(settings("gtop-k", density=1e-7), inputs)
    assert means[0][0]["large"].nonzero().tolist() == [[far]]


@pytest.mark.parametrize("method", ["top-k", "gtop-k", "1-bit", "powersgd"])
def test_training_goes_on_exactly_from_a_state_and_in_other_buckets(method):
    inputs = drawn(3, steps=4)
    expected, _, _ = averaged(settings(method), inputs)
    _, stopped, _ = averaged(settings(method), inputs[:2])
    states = [one.state_dict() for one in stopped]

    def go_on(wire):
        resumed = type(stopped[0])(settings(method), wire)
        resumed.load_state_dict(states[wire.rank])
        found = []
        for step in inputs[2:]:
            gradients = copied(step[wire.rank])
            first = {"second.weight": gradients["second.weight"]}
            rest = {name: one for name, one in gradients.items() if name not in first}
            resumed.average(first, is_last=False)
            resumed.average(rest)
            found.append(gradients)
        return found

    results, _ = on_ranks(3, go_on)
    for rank, found in enumerate(results):
        for number, one in enumerate(found):
            assert all(torch.equal(one[n], expected[2 + number][rank][n]) for n in SHAPES)


@pytest.mark.parametrize("ranks", [1, 2, 6])
def test_another_number_of_ranks_owes_parameters_as_much(ranks):
    before, after = drawn(3, steps=3), drawn(ranks, steps=3, seed=5)
    means, compressors, _ = averaged(settings("gtop-k"), before)
    states = reshared([one.state_dict() for one in compressors], ranks)

    def go_on(wire):
        resumed = type(compressors[0])(settings("gtop-k"), wire)
        with pytest.raises(InputError, match="reshared"):
            resumed.load_state_dict(compressors[0].state_dict() | {"ranks": ranks + 1})
        resumed.load_state_dict(states[wire.rank])
        steps = [copied(step[wire.rank]) for step in after]
        for gradients in steps:
            resumed.average(gradients)
        return steps, resumed

    results, _ = on_ranks(ranks, go_on)
    applied = total([step[0] for step in means] + results[0][0])
    given = total([one for step in before for one in step])
    later = total([one for step in after for one in step])
    left = owed([one for _, one in results])
    for name in SHAPES:
        mean_given = given[name] / 3 + later[name] / ranks
        torch.testing.assert_close(
            applied[name] + left[name] / ranks, mean_given, atol=1e-12, rtol=0
        )


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"method": "topk"}, "method must be one of"),
        ({"density": 0.0}, "above 0"),
        ({"warm_up": iter([0.5, 0.1])}, "warm_up is a sequence"),
        ({"density": "0.1"}, "above 0 and at most 1, not '0.1'"),
        ({"clip": "1"}, "not negative, not '1'"),
        ({"momentum": 1.0}, "momentum"),
        ({"method": "int8", "momentum": 0.9}, "optimizer"),
        ({"masked": False}, "not masked"),
        ({"residual": "paper"}, "gTop-k"),
        ({"rank": 0}, "rank"),
        ({"rank": 1.5}, "rank"),
        ({"dense_steps": -1}, "dense_steps"),
        ({"clip": math.nan}, "clip"),
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong, says):
    with pytest.raises(InputError, match=says):
        settings(**({"method": "top-k"} | wrong))
    with pytest.raises(InputError, match="all ranks"):
        reshared([{"ranks": 2}], 3)
