"""Pulls and pushes of parameters that lie on servers, without torch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from shardwright.core.graph import OperatorGraph
from shardwright.core.program import Kind, Program
from shardwright.core.strategy import GradientSync, Strategy
from shardwright.operators.splitting import find_samples
from shardwright.planner.lower import lower
from shardwright.planner.lower.incremental import IncrementalLowering
from shardwright.planner.space import Seed, seed_strategy
from shardwright.planner.space.servers import with_servers
from shardwright.proofs import check, check_complete
from tests.laws.columns import columns
from tests.planner.lower.test_incremental import tied
from tests.planner.search.models import mlp, residual


def plans(graph: OperatorGraph) -> list[Strategy]:
    base = seed_strategy(graph, Seed(data=2, num_microbatches=2))
    wide = seed_strategy(graph, Seed(data=2, tensor=2))
    both = with_servers(base, (0, 1), (2, 3))
    narrow = replace(base.gradient_sync, dtype="bfloat16", error_feedback=True)
    return [
        base,
        with_servers(base, (0,), (1, 2)),
        both,
        with_servers(base, (0, 1), (0, 1)),
        replace(with_servers(wide, (4, 5), (0, 1, 2, 3)), clips=True),
        replace(with_servers(wide, (0, 2), (0, 1, 2, 3)), clips=True),
        replace(both, gradient_sync=GradientSync()),
        replace(both, gradient_sync=narrow),
        base,
    ]


def test_programs_of_servers_are_complete_and_alike_however_they_are_lowered() -> None:
    for build in (tied, residual):
        graph = build(batch=8)
        again = IncrementalLowering(graph, find_samples(graph))
        for plan in [*plans(graph), *plans(graph)]:
            program = lower(graph, plan)
            check(program)
            check_complete(program, graph)
            assert columns(program) == columns(again.lower(plan))


def instructions(program: Program, mesh: int, kind: Kind) -> list[int]:
    return np.flatnonzero((program.group == mesh) & (program.kind == kind)).tolist()


def test_pushes_leave_within_backward_and_servers_run_nothing_but_updates() -> None:
    graph = mlp(depth=4)
    program = lower(graph, with_servers(seed_strategy(graph, Seed(data=2)), (0,), (1, 2)))
    assert set(program.kind[program.group == 0].tolist()) == {
        int(Kind.SEND), int(Kind.RECEIVE), int(Kind.UPDATE),
    }  # fmt: skip
    sends = instructions(program, 1, Kind.SEND)
    assert len(sends) == len(program.strategy.gradient_sync.buckets) > 1
    last = max(instructions(program, 1, Kind.BACKWARD))
    assert all(place < last for place in sends[:-1])
    # Workers hold no parameter between steps, and servers no activation.
    sizes = [graph.tensors[tensor].bytes for tensor in graph.parameters]
    assert program.base_bytes == (3 * sum(sizes), 0)


def test_every_worker_pushes_and_pulls_each_parameter_once() -> None:
    graph = residual(batch=8)
    for servers, workers in (((0,), (1, 2)), ((0, 1, 2), (3, 4)), ((0, 1), (0, 1))):
        program = lower(graph, with_servers(seed_strategy(graph, Seed(data=2)), servers, workers))
        count = sum(graph.tensors[tensor].numel for tensor in graph.parameters)
        for purpose in ("parameter", "synchronise"):
            moved = dict.fromkeys(workers, 0)
            for item, message in enumerate(program.messages):
                if message.purpose == purpose:
                    for piece in [one for pieces in program.pieces(item) for one in pieces]:
                        ends = {"parameter": piece.destination, "synchronise": piece.source}
                        moved[ends[purpose]] += piece.num_elements
            assert moved == dict.fromkeys(workers, count)


def test_a_server_has_room_for_the_terms_of_a_bucket_while_they_arrive() -> None:
    graph = mlp(depth=2)
    for workers in (2, 4):
        seed = seed_strategy(graph, Seed(data=workers))
        program = lower(graph, with_servers(seed, (0,), tuple(range(1, 1 + workers))))
        for index in instructions(program, 0, Kind.RECEIVE):
            message = program.messages[int(program.item[index])]
            own = sum(program.values[value].bytes for value in message.results)
            assert program.temporary[index] == workers * own
