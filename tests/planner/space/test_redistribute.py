"""Re-layout sequences, played on real arrays and compared with cutting the whole tensor directly."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shardwright.core.layout import (
    FLAT,
    PARTIAL,
    REPLICATE,
    Layout,
    inner,
    local_shape,
    normal,
    shard_offsets,
    unflattened,
)
from shardwright.planner.space.redistribute import Step, _by_bytes, _cheapest, reshard_steps

Shards = dict[tuple[int, ...], np.ndarray]


def cut(whole: np.ndarray, layout: Layout, sizes: tuple[int, ...]) -> Shards:
    """Cut a tensor by definition; partial sums put everything into coordinate 0 of the axis, plus noise.

    What the other axes leave is flattened, padded and cut by every flat axis in turn.
    """
    shape = local_shape(whole.shape, unflattened(layout), sizes)
    shards: Shards = {}
    for place in itertools.product(*map(range, sizes)):
        begin = shard_offsets(whole.shape, layout, sizes, place)
        window = tuple(slice(b, b + n) for b, n in zip(begin, shape, strict=True))
        share = 1.0
        for placement, size, where in zip(layout, sizes, place, strict=True):
            if placement == PARTIAL:
                share *= (where + 1) / (size * (size + 1) / 2)
        shards[place] = whole[window] * share
        for placement, size, where in zip(layout, sizes, place, strict=True):
            if placement == FLAT and size > 1:
                shards[place] = padded(shards[place], size)[where]
    return shards


def padded(shard: np.ndarray, pieces: int) -> list[np.ndarray]:
    """Return a shard as rows of equal length, zeros at the end."""
    flat = shard.reshape(-1)
    return np.split(np.append(flat, np.zeros(-flat.size % pieces)), pieces)


def peers(
    place: tuple[int, ...], axes: tuple[int, ...], sizes: tuple[int, ...]
) -> list[tuple[int, ...]]:
    options = [range(size) if axis in axes else [place[axis]] for axis, size in enumerate(sizes)]
    return list(itertools.product(*options))


def play_flat(group: list[np.ndarray], step: Step, mine: int, after: tuple[int, ...]) -> np.ndarray:
    """Gather flat shards and leave their padding away, or cut them."""
    if step.primitive == "all_gather":
        return np.concatenate(group)[: math.prod(after)].reshape(after)
    held = np.sum(group, axis=0) if step.primitive == "reduce_scatter" else group[mine]
    return padded(held, len(group))[mine]


def play(shards: Shards, step: Step, sizes: tuple[int, ...], whole: tuple[int, ...]) -> Shards:
    """Do one collective the way its definition says; ``whole``: the shape it leads to."""
    result: Shards = {}
    for place in shards:
        group = [shards[other] for other in peers(place, step.axes, sizes)]
        axis = step.axes[0]
        pieces, mine = sizes[axis], place[axis]
        if step.primitive == "all_reduce":
            result[place] = np.sum(group, axis=0)
        elif FLAT in (step.from_dim, step.to_dim):
            result[place] = play_flat(group, step, mine, whole)
        elif step.primitive == "all_gather":
            result[place] = np.concatenate(group, axis=step.from_dim)
        elif step.primitive == "slice":
            result[place] = np.split(shards[place], pieces, axis=step.to_dim)[mine]
        elif step.primitive == "reduce_scatter":
            result[place] = np.split(np.sum(group, axis=0), pieces, axis=step.to_dim)[mine]
        else:
            parts = [np.split(piece, pieces, axis=step.to_dim)[mine] for piece in group]
            result[place] = np.concatenate(parts, axis=step.from_dim)
    return result


placement = st.sampled_from([REPLICATE, PARTIAL, 0, 1, inner(0), inner(1), FLAT])


@given(
    source=st.tuples(placement, placement),
    target=st.tuples(placement, placement),
    sizes=st.sampled_from([(2, 2), (2, 3), (1, 4), (3, 1)]),
)
def test_any_sequence_found_turns_the_source_shards_into_the_target_shards(
    source: Layout, target: Layout, sizes: tuple[int, ...]
) -> None:
    whole = np.arange(12.0 * 24).reshape(12, 24)
    try:
        steps = reshard_steps(whole.shape, "float64", source, target, sizes)
    except ValueError:
        lost = [t == PARTIAL and s != PARTIAL for s, t in zip(source, target, strict=True)]
        assume(any(lost))
        return
    shards = cut(whole, source, sizes)
    for step in steps:
        shards = play(shards, step, sizes, local_shape(whole.shape, step.layout, sizes))
    wanted = cut(whole, target, sizes)
    for place, piece in shards.items():
        np.testing.assert_allclose(piece, wanted[place], rtol=1e-12)


@pytest.mark.parametrize("scale", [2.0**30, 1.0, 37.0, 2.0**10, 2.0**14])
def test_a_single_move_that_is_best_where_bytes_matter_is_so_at_every_scale(scale: float) -> None:
    sizes, core, kinds = (4, 2), (8, 8), [REPLICATE, PARTIAL, 0, 1, inner(0), inner(1)]
    ways = [way for way in itertools.product(kinds, repeat=2) if normal(way, sizes) == way]
    for source, target in itertools.permutations(ways, 2):
        question = (core, source, target, sizes)
        found = _by_bytes(*question)
        if found is None or len(found) < 2:
            assert _cheapest(*question, scale) == found


@pytest.mark.parametrize(
    ("source", "target", "primitives"),
    [
        ((PARTIAL,), (REPLICATE,), ["all_reduce"]),
        ((PARTIAL,), (0,), ["reduce_scatter"]),
        ((0,), (REPLICATE,), ["all_gather"]),
        ((REPLICATE,), (1,), ["slice"]),
        ((0,), (1,), ["all_to_all"]),
        ((PARTIAL, PARTIAL), (REPLICATE, REPLICATE), ["all_reduce"]),
        ((0, 0), (REPLICATE, 0), ["all_gather", "all_gather", "slice"]),
        ((0,), (0,), []),
    ],
)
def test_the_usual_changes_take_the_usual_collectives(
    source: Layout, target: Layout, primitives: list[str]
) -> None:
    sizes = (2,) * len(source)
    steps = reshard_steps((8, 8), "float32", source, target, sizes)
    assert [step.primitive for step in steps] == primitives


def test_bytes_follow_the_message_convention() -> None:
    gather = reshard_steps((8, 8), "float32", (0,), (REPLICATE,), (4,))[0]
    scatter = reshard_steps((8, 8), "float32", (PARTIAL,), (0,), (4,))[0]
    assert gather.bytes == 8 * 8 * 4  # the full output
    assert scatter.bytes == 8 * 8 * 4  # the full input


def test_flat_shards_are_cut_before_copies_are_summed_up() -> None:
    steps = reshard_steps((5, 7), "float32", (PARTIAL, PARTIAL), (FLAT, REPLICATE), (3, 2))
    assert [(step.primitive, step.axes, step.bytes) for step in steps] == [
        ("reduce_scatter", (0,), 36 * 4),  # 35 elements, padded
        ("all_reduce", (1,), 12 * 4),
    ]
    steps = reshard_steps((5, 7), "float32", (FLAT, FLAT), (FLAT, REPLICATE), (3, 2))
    assert [(step.primitive, step.axes, step.bytes) for step in steps] == [
        ("all_gather", (1,), 12 * 4)
    ]


def test_a_size_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="no way"):
        reshard_steps((7, 5), "float32", (REPLICATE,), (0,), (2,))
