"""What is measured when: the meeting of the planner's questions, the profiler and the store.

Measurements belong to one environment (processor, torch version, threads, processes at one time)
and are kept in the store, so that a second study of the same model measures nothing. Planning
alternates with measuring: first the operator shards of plain data, tensor and pipeline
parallelism, then what the best plans of each search would run, until nothing on them is new.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from shardwright.core.cluster import Cluster
from shardwright.core.costs import CostTable, Record, operator_key
from shardwright.core.graph import OperatorGraph
from shardwright.core.plan import Frontier, Plan
from shardwright.core.strategy import Strategy
from shardwright.errors import StoreError
from shardwright.runtime.profile import (
    METHOD,
    RATES,
    Probe,
    Setting,
    Wanted,
    detect,
    local_environment,
    measure_collectives,
    measure_machine,
    measure_operators,
    num_local_devices,
)
from shardwright.store import Store, default_path
from shardwright.verbs.narrate import Shard, plain_strategies, run_of
from shardwright.verbs.records import build_costs
from shardwright.verbs.request import Request, Watch

if TYPE_CHECKING:
    from shardwright.runtime.capture import Captured

# Rates of any machine, flop or bytes a second: others were not measured, or the file is damaged.
SLOWEST, FASTEST = 1e6, 1e18
# Between searches. What no measurement corrects looks fast to a search: it is measured until what is chosen was.
ROUNDS = 12
PLANS = 8
OPERATOR_SECONDS = 40.0
COLLECTIVE_SECONDS = 12.0
SHARE = 0.25  # of the seconds left, where they are counted, that are spent on measuring one thing
# Of equal operators of a model so many run where they are measured: the first finds less in the caches than others.
ALIKE = 3
NOTHING = CostTable()


def environment() -> str:
    """Name the conditions under which all of this machine's devices are busy."""
    return local_environment(num_local_devices())


def environment_of(cluster: Cluster) -> str:
    """Name the conditions under which all ranks of a cluster are busy: of that name and these devices."""
    return (
        f"ranks of {cluster.name}; cluster {cluster.fingerprint}; {METHOD}, cores while all compute"
    )


def known_costs(graph: str = "", where: str = "") -> CostTable:
    """Return everything measured in an environment so far (this machine's, unless another is named),
    with what was fitted to plans of a graph (its fingerprint) that ran."""
    where = where or environment()
    with Store() as store:
        return build_costs(store.find(None, where), where, graph)


def costs_of(plan: Plan, cluster: Cluster | None = None) -> CostTable:
    """Return what a plan's prediction rests on: nothing measured, or what was where the ranks of its
    cluster are, or on this machine."""
    if plan.costs_fingerprint == NOTHING.fingerprint:
        return NOTHING
    there = known_costs(where=environment_of(cluster)) if cluster else NOTHING
    return there if there != NOTHING else known_costs(plan.graph_fingerprint)


def local_cluster(watch: Watch) -> Cluster:
    """Describe this machine, the same way every time: what is not known is measured and kept."""
    known = known_costs().overhead_map
    if any(name not in known for name in RATES):
        watch.tell("measuring this machine's rates", 0.0)
        keep(measure_machine(num_local_devices()))
        known = known_costs().overhead_map
    for name in RATES:
        if not SLOWEST <= known[name] <= FASTEST:
            raise StoreError(
                f"{default_path()}: {name} of this machine must lie between {SLOWEST:g} and {FASTEST:g} a "
                f"second, but was recorded as {known[name]:g}; move the file away to measure anew"
            )
    return detect(known)


def measure_links(cluster: Cluster, watch: Watch, *, again: bool = False) -> int:
    """Measure collectives of every group size that divides the machine; return how many records."""
    known = known_costs()
    total = cluster.num_devices
    sizes = [size for size in range(2, total + 1) if total % size == 0] or [1]
    count = 0
    for place, size in enumerate(reversed(sizes)):
        if not again and _has_group(known, size, cluster.kind_of(0).backend):
            continue
        if watch.stop():
            break

        def progress(done: int, whole: int, place: int = place, size: int = size) -> None:
            watch.tell(
                f"measuring collectives of {size} devices", (place + done / whole) / len(sizes)
            )

        progress(0, 1)
        records = measure_collectives(
            cluster,
            tuple(range(size)),
            environment=environment(),
            budget_seconds=min(COLLECTIVE_SECONDS / len(sizes), SHARE * watch.left),
            probe=Probe(overheads=size == total),
            progress=progress,
            stop=watch.stop,
        )
        keep(records)
        count += len(records)
    return count


def _has_group(known: CostTable, size: int, backend: str) -> bool:
    if size == 1:  # a device alone: what its host takes
        return {"cpu": "segment_seconds", "cuda": "start_seconds"}[backend] in known.overhead_map
    last = "held|all_reduce" if backend == "cpu" else "collective|all_reduce"
    return any(key.startswith(f"{last}|1x{size}|") for key, _ in known.collectives)


Measure = Callable[["Captured", Wanted, Cluster, Request, Watch], list[Record]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Where operators are measured, and under which name what was is kept."""

    environment: str
    measure: Measure


class Solver(Protocol):
    """Plans at the costs it is given; ``rivals`` is what it did not choose, and might at measured costs."""

    @property
    def rivals(self) -> tuple[Strategy, ...]: ...

    def __call__(self, costs: CostTable) -> Frontier: ...


def here() -> Bench:
    """Return this machine, with all of its devices busy."""
    return Bench(environment=environment(), measure=measure_shards)


def refine(
    captured: Captured,
    cluster: Cluster,
    request: Request,
    watch: Watch,
    solve: Solver,
    bench: Bench | None = None,
) -> tuple[CostTable, Frontier, int]:
    """Plan and measure in turns (on this machine, where no ``bench`` is given); return the costs, the
    frontier and how many records were made."""
    graph = captured.graph.fingerprint
    bench = bench or here()
    costs = known_costs(graph, bench.environment)
    done: set[str] = set() if request.measure == "always" else set(costs.operator_map)
    strategies = plain_strategies(captured.graph, cluster.num_devices)
    frontier: Frontier | None = None
    count = 0
    for _ in range(1 + ROUNDS):
        wanted = missing(captured.graph, strategies, request.precision, done)
        done |= wanted.keys  # what cannot be measured is not asked for again
        measures = bool(wanted.keys) and not watch.stop()
        records = bench.measure(captured, wanted, cluster, request, watch) if measures else []
        count += len(records)
        keep(records)
        if frontier is not None and (not records or watch.stop()):
            break
        costs = known_costs(graph, bench.environment)
        frontier = solve(costs)
        best = (frontier.best, *frontier.plans[:PLANS])
        strategies = (*(plan.strategy for plan in best), *solve.rivals)
    assert frontier is not None  # the first round solves
    return costs, frontier, count


def measure_shards(
    captured: Captured, wanted: Wanted, cluster: Cluster, request: Request, watch: Watch
) -> list[Record]:
    """Measure operator shards with all devices of this machine busy."""

    def progress(done: int, total: int) -> None:
        watch.tell(f"measuring operator shards, {done} of {total}", done / max(total, 1))

    progress(0, len(wanted.keys))
    return measure_operators(
        captured,
        wanted,
        Setting(
            environment=environment(),
            concurrency=cluster.num_devices,
            device=cluster.kind_of(0).backend,
            precision=request.precision,
        ),
        budget_seconds=seconds_for(wanted, watch),
        progress=progress,
        stop=watch.stop,
    )


def seconds_for(wanted: Wanted, watch: Watch) -> float:
    """Return how long so many operator shards may be measured, forward and backward."""
    return min(OPERATOR_SECONDS, 0.2 * len(wanted.keys) + 2.0, SHARE * watch.left)


def missing(
    graph: OperatorGraph, strategies: Sequence[Strategy], precision: str, done: set[str]
) -> Wanted:
    """Return all that strategies run and nobody has measured, each in what the first to run it runs."""
    runs: list[tuple[Shard, ...]] = []
    wanted: dict[str, str] = {}  # backward by forward: there may be none to measure
    for strategy in strategies:
        run, keys = shortened(graph, run_of(strategy, graph), precision)
        if fresh := keys.keys() - done - wanted.keys():
            runs.append(run)
            wanted |= {forward: keys[forward] for forward in fresh}
    return Wanted(runs=tuple(runs), keys=frozenset((*wanted, *wanted.values())))


def shortened(
    graph: OperatorGraph, run: Iterable[Shard], precision: str
) -> tuple[tuple[Shard, ...], dict[str, str]]:
    """Return what is to run of a model in order that each of its layers runs as in it, and the keys of that,
    backward by forward: of what is equal the first few."""
    kept: list[Shard] = []
    keys: dict[str, str] = {}
    count: Counter[str] = Counter()
    for shard in run:
        forward, backward = keys_of(graph, shard, precision)
        keys[forward] = backward
        count[forward] += 1
        if count[forward] <= ALIKE:
            kept.append(shard)
    return tuple(kept), keys


def keys_of(graph: OperatorGraph, shard: Shard, precision: str) -> tuple[str, str]:
    index, inputs, outputs = shard
    operator = graph.operators[index]
    forward, backward = (
        operator_key(graph, operator, inputs, outputs, phase, precision)
        for phase in ("forward", "backward")
    )
    return forward, backward


def keep(records: Sequence[Record]) -> None:
    """Put records into the store."""
    with Store() as store:
        store.put(records)
