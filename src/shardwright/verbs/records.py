"""Records to the planner's CostTable. Pure: the newest record of each name wins."""

from __future__ import annotations

from collections.abc import Iterable

from shardwright.core.costs import ADD, PACK, UPDATE, Cost, CostTable, Record


def _newest(records: Iterable[Record], environment: str) -> dict[str, Record]:
    """Return by key the latest record of an environment."""
    newest: dict[str, Record] = {}
    for record in records:
        if record.environment != environment:
            continue
        before = newest.get(record.key)
        if before is None or record.measured_at >= before.measured_at:
            newest[record.key] = record
    return newest


def build_costs(records: Iterable[Record], environment: str, graph: str = "") -> CostTable:
    """Collect the records made in ``environment``.

    Names: ``operator|...`` as ``operator_key`` writes it; ``collective|...|BYTES``, and ``held|...``,
    ``stolen|...`` and ``waited|...`` likewise (``beneath_key``); ``update|BYTES`` and ``update|STATES|BYTES``
    (``update_key``), ``add|BYTES`` (``ADD``);
    ``pack|NAME|ELEMENTS`` or ``pack|NAME|DENSITY|ELEMENTS`` (``PACK``);
    ``overhead|NAME``, whose ``seconds`` is the named scalar whatever its unit; and
    ``factor|GRAPH|WHAT``, fitted to the plans of one graph, of which those of ``graph`` count.
    """
    newest = _newest(records, environment)
    operators: list[tuple[str, Cost]] = []
    points: dict[str, list[tuple[float, float, float]]] = {}
    overheads: list[tuple[str, float]] = []
    factors: list[tuple[str, float]] = []
    for key in sorted(newest):
        record = newest[key]
        family, _, rest = key.partition("|")
        if family == "operator":
            cost = Cost(seconds=record.seconds, spread=record.spread, source="measured")
            operators.append((key, cost))
        elif family in ("collective", "held", "stolen", "waited", UPDATE, ADD, PACK):
            group, _, size = key.rpartition("|")
            points.setdefault(group, []).append((float(size), record.seconds, record.spread))
        elif family == "overhead":
            overheads.append((rest, record.seconds))
        elif family == "factor" and graph and rest.startswith(f"{graph}|"):
            factors.append((rest.partition("|")[2], record.seconds))
    collectives = tuple((group, tuple(sorted(found))) for group, found in sorted(points.items()))
    return CostTable(
        operators=tuple(operators),
        collectives=collectives,
        overheads=tuple(overheads),
        factors=tuple(factors),
    )
