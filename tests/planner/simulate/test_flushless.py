"""The rhythm and the memory of pipelines that are never flushed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shardwright.core.graph import OperatorGraph
from shardwright.core.plan import Objective, Plan, digest_of
from shardwright.core.program import Kind, Program
from shardwright.core.staleness import ACCUMULATES, ASYNCHRONOUS, versions
from shardwright.core.strategy import Strategy
from shardwright.errors import InputError
from shardwright.files.planfile import read_plan, write_plan
from shardwright.planner.lower import lower
from shardwright.planner.lower.flushless import unrolled
from shardwright.planner.simulate import simulate
from shardwright.planner.space.seeds import Seed, seed_strategy
from shardwright.proofs import check, check_complete
from tests.planner.search.models import mlp


def strategy_of(graph: OperatorGraph, stages: int, staleness: str) -> Strategy:
    pieces = stages if staleness in ACCUMULATES else 1
    return seed_strategy(graph, Seed(stages=stages, staleness=staleness, num_microbatches=pieces))


def durations(program: Program, forward: list[float], backward: list[float]) -> np.ndarray:
    """Give each stage's forward and backward so many seconds, shared out over its instructions."""
    seconds = np.zeros(program.num_instructions)
    for kind, times in ((Kind.FORWARD, forward), (Kind.BACKWARD, backward)):
        for stage, time in enumerate(times):
            mine = (program.kind == kind) & (program.group == stage)
            seconds[mine] = time / mine.sum() * program.strategy.pipeline.num_microbatches
    return seconds


@pytest.mark.parametrize("mode", ASYNCHRONOUS)
def test_a_period_is_the_longest_forward_and_backward_of_a_stage(mode: str) -> None:
    graph = mlp(depth=5)
    program = lower(graph, strategy_of(graph, 4, mode))
    check_complete(program, graph)
    many, _ = unrolled(program, 9)
    check(many)
    drawn = np.random.default_rng(3)
    for _ in range(5):
        forward, backward = drawn.uniform(1, 3, 4), drawn.uniform(1, 5, 4)
        seconds = durations(program, forward.tolist(), backward.tolist())
        found = simulate(program, seconds)
        pieces = program.strategy.pipeline.num_microbatches
        wanted = pieces * float((forward + backward).max())
        assert found.step_seconds == pytest.approx(wanted, rel=1e-9)
        chain = list(found.critical)
        total = float((found.end - found.start)[chain].sum())
        assert total / found.laps == pytest.approx(wanted, rel=1e-9)


def test_stages_of_several_devices_keep_the_rhythm_and_add_up_gradients_beside_it() -> None:
    """Sums that take less than a backward hide behind it, but for the last one's before the update."""
    graph = mlp(depth=5)
    program = lower(graph, seed_strategy(graph, Seed(stages=4, data=2, staleness="stash")))
    check_complete(program, graph)
    check(unrolled(program, 9)[0])
    clipping = lower(graph, replace(program.strategy, clips=True, max_norm=1.0))
    check_complete(clipping, graph)
    check(unrolled(clipping, 9)[0])
    seconds = durations(program, [1.0, 1.5, 1.0, 1.2], [2.0, 2.5, 2.0, 2.0])
    assert simulate(program, seconds).step_seconds == pytest.approx(4.0, rel=1e-9)
    sums = np.array(
        [
            kind == Kind.MESSAGE and program.messages[item].purpose == "synchronise"
            for kind, item in zip(program.kind, program.item, strict=True)
        ]
    )
    assert sums.any()
    # The last sum of stage 1 begins when its backward ends, and its update waits for it.
    found = simulate(program, np.where(sums, 0.25, seconds)).step_seconds
    assert found == pytest.approx(4.25, rel=1e-9)


def test_versions_are_what_one_staleness_holds_more_than_another() -> None:
    """Peaks differ by the copies, where nothing else is alive at another moment."""
    graph, peaks = mlp(depth=5), dict[str, tuple[float, ...]]()
    for mode in ("stale", "stash"):
        program = lower(graph, strategy_of(graph, 4, mode))
        seconds = durations(program, [1.0] * 4, [2.0] * 4)
        peaks[mode] = simulate(program, seconds).peak_bytes
    weights = [
        sum(v.bytes for v in program.values if v.role == "parameter" and v.mesh == stage)
        for stage in range(4)
    ]
    for stage in range(4):
        more = peaks["stash"][stage] - peaks["stale"][stage]
        copies = versions("stash", stage, 4)
        # While gradients pile up at the end of backward, the copy of the minibatch at work may be gone.
        assert (copies - 1) * weights[stage] <= more <= copies * weights[
            stage
        ] + 1 or copies == more == 0


def test_a_plan_file_says_it_and_refuses_what_it_does_not_know(tmp_path) -> None:
    graph = mlp(depth=3)
    strategy = strategy_of(graph, 2, "stash")
    other = replace(strategy, pipeline=replace(strategy.pipeline, staleness="none"))
    assert digest_of(strategy) != digest_of(other)
    plan = Plan(
        strategy=strategy, predicted=Objective(step_seconds=1.0, peak_bytes=1.0), model="m",
        graph_fingerprint=graph.fingerprint, cluster_name="c", cluster_fingerprint="c",
        costs_fingerprint="c", global_batch=8, method="m", seed=0, version="1",
    )  # fmt: skip
    path = write_plan(tmp_path / "plan.json", plan)
    assert read_plan(path, graph).strategy == strategy
    text = path.read_text()
    assert '"staleness": "stash"' in text
    assert (
        "staleness"
        not in write_plan(tmp_path / "o.json", replace(plan, strategy=other)).read_text()
    )
    path.write_text(text.replace('"stash"', '"stashed"'))
    with pytest.raises(InputError, match="staleness"):
        read_plan(path)
