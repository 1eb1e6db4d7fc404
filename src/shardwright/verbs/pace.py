"""Whether a machine is as fast as when it was measured: some of it again, beside its records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardwright.core.cluster import Cluster
from shardwright.core.costs import CostTable, Record
from shardwright.core.graph import OperatorGraph
from shardwright.core.strategy import Strategy
from shardwright.planner.search import Survey
from shardwright.runtime.profile import Wanted
from shardwright.store import Store, are_apart, is_old
from shardwright.verbs.measure import Bench, here, keys_of, shortened
from shardwright.verbs.narrate import run_of
from shardwright.verbs.request import Request, Watch

if TYPE_CHECKING:
    from shardwright.runtime.capture import Captured

# So many of the shards that take longest are measured again, where their records are so old.
SAMPLED = 12
# Within this share nothing is said, unless a prediction claims to be nearer: two profiles in a row differ by as much.
USUAL = 0.1
HOSTS = "these ranks were"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How long operators, or messages, take now as a multiple of what they took at ``measured_at``;
    ``spread`` is the half-width of that ratio, and ``within`` a share that is not worth a word. ``is_fitted``: costs
    have been fitted to trials of another hour, whose own pace is in them, and nobody can tell how much of them it is."""

    ratio: float
    spread: float
    measured_at: str
    what: str = "operators"
    where: str = "this machine was"
    within: float = USUAL
    is_fitted: bool = False

    @property
    def holds(self) -> bool:
        """Whether the records still do."""
        return abs(self.ratio - 1) <= max(self.within, self.spread)

    @property
    def note(self) -> str:
        """What a planner should know of it; nothing where the records still hold."""
        if self.holds:
            return ""
        return (
            f"{self._differs}: step times predicted or measured then are off by "
            "as much; end other programs, or measure and try again with `--measure always`"
        )

    @property
    def heeds(self) -> str:
        """What is said where costs are as they are ``heeded``."""
        return f"{self._differs}, and step times are predicted so; `--measure always` measures all of them again"

    def heeded(self, costs: CostTable) -> CostTable:
        """Return costs of operators that take as long as now."""
        factors = costs.factor_map
        compute = self.ratio * factors.get("compute", 1.0)
        return replace(costs, factors=tuple((factors | {"compute": compute}).items()))

    @property
    def _differs(self) -> str:
        return (
            f"{self.what} now take {self.ratio:.2f} times (±{self.spread:.2f}) what they took when "
            f"{self.where} measured ({self.measured_at})"
        )


def pace_of(
    captured: Captured,
    strategies: Sequence[Strategy],
    cluster: Cluster,
    request: Request,
    watch: Watch,
    bench: Bench | None = None,
    last: Survey | None = None,
) -> Pace | None:
    """Measure some of what strategies run again, on this machine where no ``bench`` is given; None where
    no record of it is old. The ``last`` search knows how near the first of them is claimed to be."""
    place = bench or here()
    known = newest(place.environment)
    wanted = _old(strategies, captured.graph, request.precision, known)
    again = place.measure(captured, wanted, cluster, request, watch) if wanted.keys else []
    if not (found := ratio(known, again)):
        return None
    within = USUAL
    if last:
        first = last.weighed(strategies[0])
        within = min(USUAL, first.half_width / first.seconds)
    fit = known.get(f"factor|{captured.graph.fingerprint}|compute")
    return replace(
        found,
        where=HOSTS if bench else found.where,
        within=within,
        is_fitted=fit is not None and are_apart(fit.measured_at, found.measured_at),
    )


def _old(
    strategies: Sequence[Strategy],
    graph: OperatorGraph,
    precision: str,
    known: Mapping[str, Record],
) -> Wanted:
    """Return what strategies run, and the keys of the shards of it that take longest, of those with old records only."""
    runs = [shortened(graph, run_of(strategy, graph), precision)[0] for strategy in strategies]
    old: dict[tuple[str, str], float] = {}
    for shard in (shard for run in runs for shard in run):
        keys = keys_of(graph, shard, precision)
        records = [known[key] for key in keys if key in known]
        if records and is_old(records):
            old[keys] = sum(one.seconds for one in records)
    longest = sorted(old, key=old.__getitem__, reverse=True)[:SAMPLED]
    return Wanted(runs=tuple(runs), keys=frozenset(key for keys in longest for key in keys))


def ratio(known: Mapping[str, Record], again: Iterable[Record]) -> Pace | None:
    """Compare records by key with those of now, each by its seconds: as in a step. None where there is
    nothing to compare."""
    pairs = [(known[one.key], one) for one in again if one.key in known]
    if not pairs:
        return None
    then, now = (sum(pair[place].seconds for pair in pairs) for place in (0, 1))
    if not then > 0:
        return None
    spreads = [sum(pair[place].spread for pair in pairs) for place in (0, 1)]
    times = now / then
    return Pace(
        ratio=times,
        spread=times * spreads[0] / then + spreads[1] / then,
        measured_at=max(pair[0].measured_at for pair in pairs),
    )


def newest(environment: str) -> dict[str, Record]:
    """Return by key the latest records of an environment."""
    with Store() as store:
        records = store.find(None, environment)
    return {one.key: one for one in sorted(records, key=lambda one: one.measured_at)}
