"""Split backwards: what the papers print, what torch lists, and every order of small pipelines."""

from __future__ import annotations

import itertools
import random
from functools import lru_cache

import pytest

from shardwright.planner.schedule import (
    Room,
    StageTimes,
    folded,
    held,
    most_bytes,
    pipeline_order,
    replay,
    search_order,
)
from shardwright.planner.schedule.pipeline import Action, check_order
from shardwright.planner.schedule.searched import FEW, least_span
from tests.planner.schedule.drawn import bubble

# Qi et al., ICLR 2024, tables of measured times and of bubble rates: p, m, F, I, W, transfer in ms; the
# rates of 1F1B, interleaved 1F1B, ZB-H1, ZB-H2, ZB-1p, ZB-2p. Interleaved: with so many chunks.
PRINTED = [
    (8, 24, 18.522, 18.086, 9.337, 0.601, 3, 0.2431, 0.1055, 0.1585, 0.1083, 0.1585, 0.0433),
    (8, 32, 18.513, 18.086, 9.331, 0.626, 3, 0.1985, 0.0818, 0.1242, 0.0837, 0.1242, 0.0039),
    (8, 24, 29.718, 29.444, 19.927, 0.527, 4, 0.2347, 0.0808, 0.1323, 0.0698, 0.1323, 0.0029),
    (16, 48, 11.347, 11.248, 8.132, 0.377, 3, 0.2552, 0.1104, 0.1397, 0.0672, 0.1397, 0.0066),
    (32, 256, 10.402, 10.248, 7.698, 0.460, 2, 0.1352, 0.0624, 0.0594, 0.0257, 0.0594, 0.0018),
]  # fmt: skip


def equal(count, forward, backward, weight, receive=0.0):
    one = StageTimes(forward=forward, backward=backward, weight=weight, receive=receive)
    return [one] * count


@pytest.mark.parametrize("row", PRINTED)
def test_bubble_rates_are_those_the_paper_prints(row):
    p, m, forward, backward, weight, transfer, chunks, *rates = row
    stages = equal(p, forward, backward, weight, transfer)
    for name, rate in zip(("1f1b", "zb-h1", "zb-h2"), (rates[0], *rates[2:4]), strict=True):
        assert bubble(replay(pipeline_order(name, p, m), stages), stages) == pytest.approx(
            rate, abs=1e-4
        )
    parts = equal(p * chunks, forward / chunks, backward / chunks, weight / chunks, transfer)
    crews = tuple(tuple(range(k, p * chunks, p)) for k in range(p))
    lines = pipeline_order("interleaved", p * chunks, m, crews)
    assert bubble(replay(lines, parts), parts) == pytest.approx(rates[1], abs=0.004)
    for times, rate in ((1, rates[4]), (2, rates[5])):
        room = Room(limits=[times * p] * p, kept=[1.0] * p, left=[0.5] * p)
        lines = search_order(stages, m, room)
        assert room.has(lines)
        assert bubble(replay(lines, stages), stages) <= rate + 1e-3


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 2), (4, 9), (8, 16)])
def test_memory_is_the_papers(p, m):
    """ZB-H1: (p-k) M_B + k M_W; ZB-H2: (2p-2k-1) M_B + 2k M_W, counted from k = 0."""
    kept, left = 7.0, 3.0
    for name, ahead in (("zb-h1", 1), ("zb-h2", 2)):
        found = most_bytes(pipeline_order(name, p, max(m, 4 * p)), [kept] * p, [left] * p)
        for k, size in enumerate(found):
            wanted = (ahead * (p - 1 - k) + 1) * kept + ahead * k * left
            assert size <= wanted + 1e-9
            assert size >= wanted - kept + left - 1e-9  # exact but for what W is put off


@lru_cache
def sequences(m):
    """All orders of one stage: F, I and W of m microbatches, each in ascending order."""
    found = []

    def go_on(text):
        f, i, w = map(text.count, "FIW")
        if len(text) == 3 * m:
            found.append(text)
        for phase, may in (("F", f < m), ("I", i < f), ("W", w < i)):
            if may:
                go_on(text + phase)

    go_on("")
    return found


def peak(text, left):
    sizes = itertools.accumulate({"F": 1, "I": left - 1, "W": -left}[c] for c in text)
    return max(sizes)


def longest_span(stages, texts, most):
    """The times of given orders, stage by stage until nothing moves; infinite above ``most``."""
    ends = [{"F": [], "I": [], "W": []} for _ in stages]
    place, free, begin = [0] * len(stages), [0.0] * len(stages), [0.0] * len(stages)
    has_moved = True
    while has_moved:
        has_moved = False
        for k, (stage, text) in enumerate(zip(stages, texts, strict=True)):
            while place[k] < len(text):
                phase, start = text[place[k]], free[k]
                number = len(ends[k][phase])
                other = {"F": k - 1, "I": k + 1, "W": -1}[phase]
                if 0 <= other < len(stages):
                    if len(ends[other][phase]) <= number:
                        break
                    start = max(start, ends[other][phase][number] + stages[max(k, other)].receive)
                if not place[k]:
                    begin[k] = start
                free[k] = (
                    start + {"F": stage.forward, "I": stage.backward, "W": stage.weight}[phase]
                )
                if free[k] - begin[k] > most:
                    return float("inf")
                ends[k][phase].append(free[k])
                place[k] += 1
                has_moved = True
    if any(at < len(text) for at, text in zip(place, texts, strict=True)):
        return float("inf")
    return max(f - b for f, b in zip(free, begin, strict=True))


def random_stages(rng, count):
    def some():
        return rng.choice([1.0, 2.0, rng.random() * 3, rng.random()])

    return [
        StageTimes(
            forward=some(), backward=some(), weight=some(), receive=rng.choice([0.0, some()])
        )
        for _ in range(count)
    ]


SMALL = [(1, 3), (2, 1), (2, 2), (2, 3), (3, 1), (3, 2)]


@pytest.mark.parametrize("seed", range(36))
def test_no_order_of_a_small_pipeline_beats_the_searched_one(seed):
    rng = random.Random(seed)
    p, m = SMALL[seed % len(SMALL)] if seed % 12 != 5 else (3, 3)
    stages, left = random_stages(rng, p), rng.choice([0.25, 0.5, 1.0])
    most = rng.choice([1.0, 1.5, 2.0, 9.0]) if p * m < 9 else 1.5
    room = Room(limits=[most] * p, kept=[1.0] * p, left=[left] * p)
    lines = search_order(stages, m, room)
    found = replay(lines, stages).span
    assert room.has(lines)
    assert least_span(stages, m, room) <= found * (1 + 1e-12)
    own = [text for text in sequences(m) if peak(text, left) <= most + 1e-9]
    for texts in itertools.product(own, repeat=p):
        assert longest_span(stages, texts, found) >= found - 1e-9


def test_branch_and_bound_finds_what_no_play_does(monkeypatch):
    better = 0
    room = Room(limits=[2.0] * 3, kept=[1.0] * 3, left=[0.25] * 3)
    for seed in range(40):
        stages = random_stages(random.Random(seed), 3)
        spans = []
        for few in (0, FEW):
            monkeypatch.setattr("shardwright.planner.schedule.searched.FEW", few)
            spans.append(replay(search_order(stages, 3, room), stages).span)
        assert spans[1] <= spans[0]
        better += spans[1] < spans[0] * (1 - 1e-6)
    assert better


def test_nothing_is_found_where_no_forward_fits():
    room = Room(limits=[0.5, 9.0], kept=[1.0] * 2, left=[0.5] * 2)
    assert search_order(equal(2, 1.0, 1.0, 1.0), 4, room) is None


@pytest.mark.parametrize("p", [1, 2, 3, 4, 7, 8])
def test_a_v_has_no_bubble_where_all_three_take_equally_long(p):
    for m in (max(1, 2 * p - 1), 2 * p, 3 * p + 1):
        stages = equal(2 * p, 1.0, 1.0, 1.0)
        lines = pipeline_order("zb-v", 2 * p, m)
        assert bubble(replay(lines, stages), stages) == pytest.approx(0.0, abs=1e-12)
        check_order(lines, folded(2 * p), m)
        assert max(most_bytes(lines, [0.5] * 2 * p, [0.5] * 2 * p)) <= p


@pytest.mark.parametrize("p", [2, 3, 4, 5, 8, 11])
def test_smaller_vs_hold_a_half_and_a_third(p):
    """Qi et al., 2024: p/2 and p/3 of a device's activations, and up to two microbatches more."""
    stages, m = equal(2 * p, 1.0, 1.0, 1.0), 4 * p
    spans = []
    for name, share in (("zb-v", 1.0), ("v-half", 1 / 2), ("v-min", 1 / 3)):
        lines = pipeline_order(name, 2 * p, m)
        check_order(lines, folded(2 * p), m)
        assert max(most_bytes(lines, [0.5] * 2 * p, [0.25] * 2 * p)) <= share * p + 1
        spans.append(replay(lines, stages).span)
    assert spans == sorted(spans)
    # One F, I and W of a chunk at a time: the bubbles of 1F1B, halved, two thirds, and some.
    one = (p - 1) * 6
    assert spans[1] - 6 * m <= one / 2 + 4
    assert spans[2] - 6 * m <= one * 2 / 3 + 6


def test_a_v_needs_two_meshes_a_device():
    with pytest.raises(ValueError, match="give an even number"):
        pipeline_order("zb-v", 3, 4)


NAMES = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


def order_of_torch(name, p, m, chunks):
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    return [
        tuple(
            Action(one.stage_index, NAMES[one.computation_type.name], one.microbatch_index)
            for action in line
            if action is not None
            for one in (action.sub_actions or (action,))
            if one.computation_type.name in NAMES
        )
        for line in get_schedule_ops(name, p, m, chunks)
    ]


@pytest.mark.torch
@pytest.mark.parametrize(
    ("name", "seconds", "most"),
    [
        ("GPipe", 33, 8), ("LoopedBFS", 28.5, 8), ("Interleaved1F1B", 28.5, 5.5),
        ("InterleavedZeroBubble", 25.5, 4), ("ZBVZeroBubble", 25.5, 4), ("DualPipeV", 25.5, 4.5),
    ],
)  # fmt: skip
def test_orders_of_torch_take_what_is_known_of_them(name, seconds, most):
    """F 1, B 2, over chunks: four devices, eight microbatches."""
    chunks = 1 if name == "GPipe" else 2
    stages = equal(4 * chunks, 1 / chunks, 1 / chunks, 1 / chunks)
    lines = order_of_torch(name, 4, 8, chunks)
    assert replay(lines, stages).seconds == pytest.approx(seconds)
    kept = [1 / chunks] * 4 * chunks
    # torch's count lets go with I: the peak of the first rank.
    assert most_bytes(lines, kept, [0.0] * len(kept))[0] <= most


# By ours: torch's, and whether it takes any number of chunks. What W fills is laid out for equal times.
RIVALS = {
    "interleaved": ("Interleaved1F1B", True),
    "looped-bfs": ("LoopedBFS", True),
    "zb-v": ("ZBVZeroBubble", False),
    "zb-interleaved": ("InterleavedZeroBubble", True),
}
EQUAL = (1.0, 1.0, 1.0, 0.0)


@pytest.mark.torch
@pytest.mark.parametrize("p", [2, 3, 8])
def test_ours_are_never_longer_than_torchs(p):
    """Any number of microbatches and chunks that torch takes, F, I, W and transfer of a chunk."""
    cases = itertools.product((1, 3, 5, 8, 16), (2, 3), RIVALS)
    compared = 0
    for m, chunks, (name, (other, takes_any)) in ((m, v, (n, RIVALS[n])) for m, v, n in cases):
        if m % max(1, m // p) or (chunks > 2 and not takes_any):
            continue
        crews = tuple(tuple(range(k, p * chunks, p)) for k in range(p))
        mine = pipeline_order(name, p * chunks, m, crews)
        theirs = order_of_torch(other, p, m, chunks)
        several = [EQUAL, (1.0, 1.0, 0.6, 0.0), (1.0, 1.3, 0.8, 0.1)]
        for times in several[: 1 if name == "zb-interleaved" else None]:
            stages = equal(p * chunks, *times)
            found, wanted = replay(mine, stages), replay(theirs, stages)
            assert found.span <= wanted.span + 1e-9, (name, m, chunks, times)
            assert found.seconds <= wanted.seconds + 1e-9, (name, m, chunks, times)
            compared += 1
    assert compared > 40


@pytest.mark.parametrize(
    ("p", "m", "chunks"), [(2, 4, 3), (4, 8, 2), (4, 16, 3), (8, 16, 2), (3, 7, 2)]
)
def test_an_interleaved_order_with_split_backwards_keeps_no_more_than_its_first_device_did(
    p, m, chunks
):
    crews = tuple(tuple(range(k, p * chunks, p)) for k in range(p))
    kept, left = [1 / chunks] * p * chunks, [0.5 / chunks] * p * chunks
    stages = equal(p * chunks, 1.0, 1.0, 1.0)
    whole, split = (
        pipeline_order(name, p * chunks, m, crews) for name in ("interleaved", "zb-interleaved")
    )
    assert max(most_bytes(split, kept, left)) <= most_bytes(whole, kept, left)[0]
    assert replay(split, stages).span < replay(whole, stages).span


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2"])
@pytest.mark.parametrize(("p", "m"), [(1, 1), (3, 2), (4, 4), (5, 13)])
def test_orders_with_a_split_backward_are_complete(name, p, m):
    lines = pipeline_order(name, p, m)
    check_order(lines, tuple((k,) for k in range(p)), m)
    assert max(held(lines).values()) <= m


def test_a_few_plays_find_nearly_what_all_do(monkeypatch):
    """The order of a large pipeline is searched in bounded work: 12 plays instead of 104."""
    rng = random.Random(1)
    stages = [
        StageTimes(forward=1 + rng.random() * 0.3, backward=1 + rng.random() * 0.3, weight=0.9)
        for _ in range(8)
    ]
    room = Room(limits=[16.0] * 8, kept=[1.0] * 8, left=[0.5] * 8)
    spans = []
    for plays in (1000, 12, 1):
        monkeypatch.setattr("shardwright.planner.schedule.searched.MOST_PLAYED", plays * 3 * 8 * 40)
        spans.append(replay(search_order(stages, 40, room), stages).span)
    assert spans[0] <= spans[1] <= spans[0] * 1.005 < spans[2]
