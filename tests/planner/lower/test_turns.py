"""Which gradient reduce-scatters are completed before which: memory bounded, no needless waits."""

from __future__ import annotations

import pytest

from shardwright.core.completion import completions, scatter_turns
from shardwright.core.program import Kind, Program
from shardwright.planner.lower import lower
from shardwright.planner.space import Seed, seed_strategy
from tests.planner.lower.test_lower import transformer_like


def programs() -> list[Program]:
    graph = transformer_like()
    seeds = (
        Seed(data=2, zero=2),
        Seed(data=2, zero=3, num_microbatches=4),
        Seed(data=2, stages=2, zero=3, num_microbatches=4),
    )
    return [lower(graph, seed_strategy(graph, seed)) for seed in seeds]


@pytest.mark.parametrize("number", range(3))
def test_a_scatter_is_completed_before_a_third_as_large_begins_and_no_sooner(number: int) -> None:
    program = programs()[number]
    until = completions(program, on_host=True)
    pairs = {
        int(a): int(b)
        for some, turns in scatter_turns(program, on_host=True)
        for a, b in zip(some, turns, strict=True)
    }
    seen = 0
    for mesh in range(len(program.meshes)):
        scatters = [
            index
            for index in range(program.num_instructions)
            if program.kind[index] == Kind.MESSAGE
            and program.group[index] == mesh
            and program.messages[program.item[index]].scatters_gradients
        ]
        size = {index: program.messages[program.item[index]].bytes for index in scatters}
        most = 2 * max(size.values())
        for place, index in enumerate(scatters):
            later = scatters[place:]
            full = [j for n, j in enumerate(later) if sum(size[k] for k in later[: n + 1]) > most]
            assert pairs.get(index, -1) == (full[0] if full else -1)
            seen += bool(full)
        # What is under way at any time: issued, and not yet completed.
        for index in scatters:
            under_way = [k for k in scatters if k <= index < until[k]]
            assert sum(size[k] for k in under_way) <= most
    assert seen > 0


def test_on_other_devices_a_scatter_is_completed_before_the_next_begins() -> None:
    for program in programs():
        for mesh, (some, turns) in enumerate(scatter_turns(program)):
            scatters = [
                index
                for index in range(program.num_instructions)
                if program.kind[index] == Kind.MESSAGE
                and program.group[index] == mesh
                and program.messages[program.item[index]].scatters_gradients
            ]
            assert some.tolist() == scatters[:-1]
            assert turns.tolist() == scatters[1:]
