"""Transfers that share ports: pushes to parameter servers and pulls from them, by closed forms."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwright.core.cluster import Cluster, Link
from shardwright.core.costs import CostTable
from shardwright.core.graph import OperatorGraph
from shardwright.core.program import Kind, Program
from shardwright.core.scaling import Exchanged
from shardwright.planner.cost.price import InstructionCosts
from shardwright.planner.cost.shards import ShardPrices
from shardwright.planner.lower import lower
from shardwright.planner.simulate import simulate
from shardwright.planner.space import Seed, seed_strategy
from shardwright.planner.space.servers import with_servers
from tests.planner.search.models import cluster, mlp

RATE = 1e9  # of a host's link, bytes per second


def graph() -> OperatorGraph:
    """Four layers that compute next to nothing, of 16 million parameters each."""
    return mlp(batch=8, width=4096, depth=4, classes=8)


def hosts(count: int) -> Cluster:
    """Hosts of one device, whose links are the only thing that takes time."""
    made = cluster(count, 1, near=1e15, flops=1e21)
    link = Link(latency=0.0, bandwidth=RATE, source="measured")
    near = Link(latency=0.0, bandwidth=1e15, source="measured")
    kind = replace(made.kinds[0], memory_bandwidth=1e18, launch_seconds=0.0)
    return replace(
        made,
        kinds=(kind,),
        switches=(made.switches[0], *[replace(one, link=link) for one in made.switches[1:]]),
        devices=tuple([replace(one, link=near) for one in made.devices]),
    )


def served(workers: int, servers: int, *, apart: bool) -> tuple[Program, list[float], float]:
    """Return a Program, its instructions' seconds and its step's."""
    first = servers if apart else 0
    made = with_servers(
        seed_strategy(graph(), Seed(data=workers)),
        tuple(range(servers)),
        tuple(range(first, first + workers)),
    )
    program = lower(graph(), made)
    where = hosts(max(servers, first + workers))
    prices = InstructionCosts(graph(), ShardPrices(where, CostTable())).price(program)
    timeline = simulate(program, prices.seconds)
    return program, prices.seconds.tolist(), timeline.step_seconds


@pytest.mark.parametrize(("workers", "servers"), [(4, 1), (8, 2), (2, 4), (4, 3), (1, 1)])
def test_links_of_servers_are_busy_as_long_as_the_closed_form_says(
    workers: int, servers: int
) -> None:
    program, seconds, step = served(workers, servers, apart=True)
    size = sum(graph().tensors[tensor].bytes for tensor in graph().parameters)
    one = Exchanged(
        bytes=size, workers=workers, bandwidth=RATE, worker_bandwidth=RATE, compute_seconds=1.0
    )
    sends = [
        (program.messages[int(item)].purpose, cost)
        for kind, item, cost in zip(program.kind, program.item, seconds, strict=True)
        if kind == Kind.SEND
    ]
    pushed = sum(cost for purpose, cost in sends if purpose == "synchronise")
    pulled = sum(cost for purpose, cost in sends if purpose == "parameter")
    for full, found in ((True, pushed), (True, pulled), (False, pushed + pulled)):
        # Whichever end has more to carry: P pushes come in through one server's link.
        expected = max(
            one.server_seconds(servers, full_duplex=full), one.worker_seconds(full_duplex=full)
        )
        assert found == pytest.approx(expected, rel=5e-3)
    # A synchronous step pulls before its forward and pushes behind it: as on a half-duplex link.
    assert step == pytest.approx(pushed + pulled, rel=2e-2)


def test_what_a_worker_holds_itself_does_not_travel() -> None:
    _, _, apart = served(4, 4, apart=True)
    _, _, shared = served(4, 4, apart=False)
    assert shared == pytest.approx(apart * 3 / 4, rel=2e-2)
