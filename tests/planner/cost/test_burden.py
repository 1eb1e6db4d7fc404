"""What messages cost ranks that compute: charged as it was measured, and nothing without records."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from shardwright.core.costs import CostTable, beneath_key, collective_key, meeting_name
from shardwright.core.program import SEGMENT_KINDS, Kind, Program
from shardwright.core.staleness import Staleness
from shardwright.core.strategy import GradientSync
from shardwright.files.clusterfile import read_cluster
from shardwright.planner.cost import price
from shardwright.planner.cost.burden import NOTHING, charge, charge_entries, message_burden
from shardwright.planner.lower import lower
from shardwright.planner.space import Seed, seed_strategy
from shardwright.planner.space.seeds import single_sync
from tests.planner.lower.test_lower import transformer_like

CPU = read_cluster(
    '[kind.c]\npeak = {float32 = "0.1 TFLOP/s"}\nmemory = "1 GB"\nmemory_bandwidth = "10 GB/s"\n'
    'backend = "cpu"\n[[host]]\nkind = "c"\ndevices = 4\nlink = "2 GB/s"\n'
)
SEEDS = (
    Seed(data=4, zero=3, num_microbatches=2),
    Seed(tensor=4),
    Seed(data=2, stages=2, zero=1, num_microbatches=4),
)


def told(program: Program, seconds: list[float], burdens: np.ndarray) -> list[float]:
    """Walk every mesh's instructions one by one, as a person would read the rules."""
    result = list(seconds)
    computes = program.computes.tolist()
    waits = [set(program.predecessor[a:b].tolist()) for a, b in pairwise(program.offset.tolist())]
    met = dict(since_met(program, seconds, burdens))
    apart = {
        (program.item[index], program.microbatch[index]): since
        for index, since in met.items()
        if program.kind[index] == Kind.SEND
    }
    for mesh in range(len(program.meshes)):
        mine = [i for i in range(len(seconds)) if program.group[i] == mesh]
        for place, index in enumerate(mine):
            if index not in met:
                continue
            since = met[index]
            held, stolen, meeting, skew, hiding = burdens[:, program.item[index]]
            if program.kind[index] != Kind.MESSAGE:
                held, stolen = held / 2, stolen / 2
            later = mine[place + 1 :]
            sends = program.kind[index] == Kind.SEND
            need = next((i for i in later if index in waits[i] and not sends), None)
            until = [i for i in later if computes[i] and (need is None or i < need)]
            computed = sum(seconds[i] for i in until)
            share = min(computed / hiding, 1.0)
            served = min(computed / (seconds[index] - stolen), 1.0)
            beneath = next((i for i in later if computes[i]), index)
            after = [i for i in later if computes[i] and need is not None and i >= need]
            result[beneath] += held + stolen * served
            longest = max(since, apart.get((program.item[index], program.microbatch[index]), 0.0))
            wait = meeting * min(longest / hiding, 1.0) ** 0.5 * (1 - share) + skew * since
            wait *= 0.0 if sends else 1.0
            result[after[0] if after else index] += wait
    return result


def since_met(
    program: Program, seconds: list[float], burdens: np.ndarray
) -> Iterator[tuple[int, float]]:
    """Yield every message's instruction and what its mesh computed since it last met another."""
    since = [0.0] * len(program.meshes)
    for index, mesh in enumerate(program.group.tolist()):
        if program.computes[index]:
            since[mesh] += seconds[index]
        elif burdens[0, program.item[index]] > 0:
            yield index, since[mesh]
            since[mesh] *= program.kind[index] == Kind.SEND


def test_who_only_waited_for_a_sender_is_as_far_apart_as_that_computed() -> None:
    """The second stage has computed nothing before its first receive, and pays for having slept all the same."""
    graph = transformer_like()
    program = lower(graph, seed_strategy(graph, Seed(stages=2)))
    seconds, spread = np.full(program.num_instructions, 2.0), np.zeros(program.num_instructions)
    burdens = np.zeros((5, len(program.messages)))
    burdens[0], burdens[2], burdens[4] = 1e-12, 1.0, 4.0
    charged = seconds.copy()
    charge(program, charged, spread, burdens)
    first = next(i for i, mesh in enumerate(program.group) if mesh == 1 and charged[i] > 2.5)
    sent = next(i for i, kind in enumerate(program.kind) if kind == Kind.SEND)
    computed = 2.0 * program.computes[:sent].sum()
    assert charged[first] - seconds[first] == pytest.approx(min(computed / 4.0, 1.0) ** 0.5)


@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: seed.label)
def test_burdens_lie_where_the_rules_put_them(seed: Seed) -> None:
    graph = transformer_like()
    program = lower(graph, seed_strategy(graph, seed))
    random = np.random.default_rng(0)
    seconds = random.uniform(1.0, 9.0, program.num_instructions)
    burdens = random.uniform(0.1, 1.0, (5, len(program.messages)))
    burdens[4] *= 20  # some are hidden, some in part
    for item, message in enumerate(program.messages):
        if message.primitive in ("slice", "copy"):
            burdens[:, item] = 0.0
    expected = told(program, seconds.tolist(), burdens)
    charged, spread = seconds.copy(), np.zeros_like(seconds)
    charge(program, charged, spread, burdens)
    assert charged == pytest.approx(expected)
    assert charged.sum() > seconds.sum()
    assert ((spread > 0) == (charged > seconds)).all()


def table(devices: int) -> CostTable:
    """Collectives of a group: 1 s held, 1 ns/byte stolen, half a second to meet."""
    names = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    points = ((1.0, 1.0, 0.0), (1e9, 2.0, 0.0))
    found = [(collective_key(name, 1, devices, "loopback"), points) for name in names]
    for what, first, last in (("held", 1.0, 1.0), ("stolen", 0.0, 1.0), ("waited", 1.5, 2.5)):
        line = ((1.0, first, 0.0), (1e9, last, 0.0))
        found += [(beneath_key(what, name, 1, devices, "loopback"), line) for name in names]
    scalars = (("skew", 0.1), ("hiding", 3.0))
    overheads = tuple((meeting_name(what, 1, devices, "loopback"), n) for what, n in scalars)
    return CostTable(collectives=tuple(sorted(found)), overheads=overheads)


def test_a_group_of_another_size_has_no_burden() -> None:
    known = message_burden("all_reduce", 1e9, (0, 1, 2, 3), CPU, table(4))
    assert (known.held, known.stolen) == pytest.approx((1.0, 1.0))
    assert (known.meeting, known.skew, known.hiding) == (0.5, 0.1, 3.0)
    assert message_burden("all_reduce", 1e9, (0, 1), CPU, table(4)) == NOTHING
    assert message_burden("transfer", 1e9, (0, 1), CPU, table(4)) == NOTHING


def test_what_was_seen_while_ranks_shared_cores_is_stretched_only_by_the_simulator() -> None:
    """Four devices on one core."""
    known = table(4)
    shared = replace(known, overheads=(*known.overheads, ("cores", CPU.num_devices / 4)))
    alone, found = (
        message_burden("all_reduce", 1e9, (0, 1, 2, 3), CPU, one) for one in (known, shared)
    )
    assert (found.held, found.stolen, found.skew) == (alone.held, alone.stolen, alone.skew)
    assert (4 * found.meeting, 4 * found.hiding) == (alone.meeting, alone.hiding)


def test_ranks_come_no_later_to_what_is_larger_than_all_that_was_waited_for() -> None:
    """A quarter of a second more for each 1e9 bytes, seen from 1 to 1e9: no more for 1e10."""
    late = table(4).collectives
    steep = ((1.0, 1.5, 0.0), (1e9, 2.75, 0.0))
    known = CostTable(
        collectives=tuple((k, steep if k.startswith("waited") else v) for k, v in late)
    )
    for num_bytes in (1e9, 1e10):
        found = message_burden("all_reduce", num_bytes, (0, 1, 2, 3), CPU, known)
        assert found.meeting == pytest.approx(0.75)


@pytest.mark.parametrize("seed", SEEDS[:2], ids=lambda seed: seed.label)
def test_a_step_of_more_messages_computes_longer_by_what_they_hold(seed: Seed) -> None:
    graph = transformer_like()
    program = lower(graph, seed_strategy(graph, seed))
    bare = CostTable(collectives=tuple(
        (key, points) for key, points in table(4).collectives if key.startswith("collective")
    ))  # fmt: skip
    messages = [program.messages[i] for i in program.item[~program.computes]]
    assert all(message.axes for message in messages)
    more = price(program, graph, CPU, table(4)).seconds - price(program, graph, CPU, bare).seconds
    assert more.sum() >= len(messages) * 1.0


def test_a_pipeline_without_a_flush_tells_the_loss_in_every_period() -> None:
    """One second of each rank, which the sum over all four holds; transfers were not measured here."""
    graph = transformer_like()
    cases: tuple[tuple[Staleness, float], ...] = (("none", 0.0), ("stash", 1.0))
    for staleness, held in cases:
        program = lower(graph, seed_strategy(graph, Seed(stages=4, staleness=staleness)))
        more, bare = (price(program, graph, CPU, one).seconds for one in (table(4), CostTable()))
        updates = program.kind == Kind.UPDATE
        assert (more - bare)[updates] == pytest.approx([held] * 4)
        assert more[~updates] == pytest.approx(bare[~updates])


def test_what_computing_threads_spend_on_messages_is_told_as_theirs() -> None:
    """A step's tables then show of an update what it takes itself; what threads steal stays where it is felt."""
    graph = transformer_like()
    program = lower(graph, seed_strategy(graph, SEEDS[0]))
    bare = CostTable(collectives=tuple(
        (key, points) for key, points in table(4).collectives if key.startswith("collective")
    ))  # fmt: skip
    alone, told_apart = (price(program, graph, CPU, one) for one in (bare, table(4)))
    assert alone.moved is None
    assert told_apart.moved is not None
    assert told_apart.moved.sum() == pytest.approx(0.0)
    updates = program.kind == Kind.UPDATE
    assert (told_apart.moved[updates] < 0).all()
    assert (told_apart.moved[program.kind == Kind.MESSAGE] >= 1.0).all()
    own = told_apart.seconds + told_apart.moved
    assert own[updates] == pytest.approx(alone.seconds[updates])


def test_gradients_that_travel_together_are_laid_side_by_side() -> None:
    """A tenth of a second each but the first, on the thread that computes, beside a second for the message."""
    graph = transformer_like()
    seed = seed_strategy(graph, Seed(data=4))
    known = table(4)
    dear = replace(known, overheads=(*known.overheads, ("part_seconds", 0.1)))
    for sync in (single_sync(graph), GradientSync()):
        program = lower(graph, replace(seed, gradient_sync=sync))
        free, charged = (price(program, graph, CPU, one).seconds.sum() for one in (known, dear))
        parts = sum(len(message.sources) - 1 for message in program.messages)
        assert charged - free == pytest.approx(0.1 * parts)
        assert (parts > 0) == (sync.method == "single")


def test_nothing_is_gained_by_hiding_what_takes_the_cores_that_compute() -> None:
    """Beneath a second or eight of computation, of a message whose threads work for three of its three seconds, or for
    a half of them."""
    graph = transformer_like()
    alone = replace(seed_strategy(graph, Seed(data=4)), gradient_sync=GradientSync())
    program = lower(graph, alone)
    purposes = [program.messages[item].purpose for item in program.item]
    message, beneath = next(
        (index, index + 1)
        for index, (kind, purpose) in enumerate(zip(program.kind, purposes, strict=True))
        if kind == Kind.MESSAGE and purpose == "synchronise" and program.computes[index + 1]
    )
    burdens = np.zeros((5, len(program.messages)))
    for work, computed, stolen in (
        (3.0, 1.0, 3.0),
        (3.0, 8.0, 3.0),
        (1.5, 1.0, 1.0),
        (1.5, 8.0, 1.5),
    ):
        seconds = np.zeros(program.num_instructions)
        seconds[[message, beneath]] = 3.0, computed
        burdens[:, program.item[message]] = 1e-12, work, 0.0, 0.0, 4.0
        charged = seconds.copy()
        charge(program, charged, np.zeros_like(seconds), burdens)
        assert charged.sum() - seconds.sum() == pytest.approx(stolen)


@pytest.mark.parametrize("seed", [*SEEDS, Seed()], ids=lambda seed: seed.label)
def test_what_runs_behind_something_else_begins_slowly(seed: Seed) -> None:
    """A pass forward and one backward on each device; more of stages whose microbatches alternate, and where messages
    are waited for at once."""
    graph = transformer_like()
    program = lower(graph, seed_strategy(graph, seed))
    seconds = np.zeros(program.num_instructions)
    charge_entries(program, seconds, {"segment_seconds": 0.0, "begin_seconds": 1.0})
    waits = [set(program.predecessor[a:b].tolist()) for a, b in pairwise(program.offset.tolist())]
    before: dict[int, int] = {}
    sent: dict[int, set[int]] = {}
    expected: list[int] = []
    for index, (kind, mesh) in enumerate(
        zip(program.kind.tolist(), program.group.tolist(), strict=True)
    ):
        messages = sent.setdefault(mesh, set())
        if kind == Kind.MESSAGE and program.messages[program.item[index]].primitive != "slice":
            messages.add(index)
        if program.computes[index]:
            if kind in SEGMENT_KINDS and (before.get(mesh) != kind or messages & waits[index]):
                expected.append(index)
            before[mesh] = kind
            messages.clear()
    assert np.flatnonzero(seconds).tolist() == expected
    assert len(expected) >= 2 * seed.stages
    assert (len(expected) > 2 * seed.stages) == (seed.num_microbatches > 1 or seed.tensor > 1)
