"""Whether this machine is as fast as when it was measured: some operators again, beside their records."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING

from shardwright.core.cluster import Cluster
from shardwright.core.costs import Record
from shardwright.core.graph import OperatorGraph
from shardwright.core.strategy import Strategy
from shardwright.store import Store
from shardwright.verbs.measure import environment, keys_of, measure_shards
from shardwright.verbs.narrate import Shard, shards
from shardwright.verbs.request import Request, Watch

if TYPE_CHECKING:
    from shardwright.runtime.capture import Captured

# So many of the shards that take longest are measured again, where their records are so old.
SAMPLED, OLD_SECONDS = 12, 600.0
# Within this share nothing is said: two profiles in a row differ by as much.
USUAL = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How long operators take now, as a multiple of what they took at ``measured_at``; ``spread`` is the
    half-width of that ratio."""

    ratio: float
    spread: float
    measured_at: str

    @property
    def note(self) -> str:
        """What a planner should know of it; nothing where the records still hold."""
        if abs(self.ratio - 1) <= max(USUAL, self.spread):
            return ""
        return (
            f"operators now take {self.ratio:.2f} times (±{self.spread:.2f}) what they took when this "
            f"machine was measured ({self.measured_at}): step times predicted or measured then are off by "
            "as much; end other programs, or measure and try again with `--measure always`"
        )


def pace_of(
    captured: Captured,
    strategies: Sequence[Strategy],
    cluster: Cluster,
    request: Request,
    watch: Watch,
) -> Pace | None:
    """Measure some of what strategies run again; None where no record of it is old."""
    known = _newest()
    longest = _old(shards(strategies, captured.graph), captured.graph, request.precision, known)
    again = measure_shards(captured, longest, cluster, request, watch) if longest else []
    pairs = [(known[one.key], one) for one in again if one.key in known]
    return _ratio(pairs) if pairs else None


def _old(
    found: Iterable[Shard], graph: OperatorGraph, precision: str, known: Mapping[str, Record]
) -> list[Shard]:
    """Return the shards that take longest, of those with old records only; no two of the same keys."""
    latest = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=OLD_SECONDS)
    old: dict[str, tuple[float, Shard]] = {}
    for shard in found:
        keys = keys_of(graph, shard, precision)
        records = [known[key] for key in keys if key in known]
        if records and max(map(_when, records)) < latest:
            old[keys[0]] = sum(one.seconds for one in records), shard
    longest = sorted(old.values(), key=itemgetter(0), reverse=True)
    return [shard for _, shard in longest[:SAMPLED]]


def _ratio(pairs: Sequence[tuple[Record, Record]]) -> Pace | None:
    """Compare (record, record of now), each shard by its seconds: as in a step."""
    then, now = (sum(pair[place].seconds for pair in pairs) for place in (0, 1))
    if not then > 0:
        return None
    spreads = [sum(pair[place].spread for pair in pairs) for place in (0, 1)]
    ratio = now / then
    return Pace(
        ratio=ratio,
        spread=ratio * spreads[0] / then + spreads[1] / then,
        measured_at=max(pair[0].measured_at for pair in pairs),
    )


def _newest() -> dict[str, Record]:
    with Store() as store:
        records = store.find(None, environment())
    return {one.key: one for one in sorted(records, key=lambda one: one.measured_at)}


def _when(record: Record) -> datetime.datetime:
    """Return when something was measured; what does not say so is as old as can be."""
    try:
        found = datetime.datetime.fromisoformat(record.measured_at)
    except ValueError:
        return datetime.datetime.min.replace(tzinfo=datetime.UTC)
    return found if found.tzinfo else found.replace(tzinfo=datetime.UTC)
