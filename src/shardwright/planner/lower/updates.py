"""Updates within backward, of the last microbatch or of each: of a parameter as soon as its gradient is
final, which then goes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from shardwright.core.program import Kind
from shardwright.planner.lower.builder import ProgramBuilder, Step
from shardwright.planner.lower.parameters import Kept
from shardwright.planner.lower.template import HELD, READ, RESOURCE, WRITTEN, Ints, Rows


def with_updates(
    builder: ProgramBuilder, parts: Sequence[Rows], kept: Sequence[Kept]
) -> list[Rows]:
    """Return the steps of a mesh's backward with updates of the parameters ``kept`` there.

    A parameter is updated behind the last step that touches it or its gradients. Where that sends, the
    update comes with the next parameter's: until then what was sent has time to arrive.
    """
    if not parts:
        return []
    steps = Rows.joined(parts)
    written, last = _touched(builder, steps)
    ready: dict[int, list[Kept]] = {}
    for one in kept:
        if one.reduced in written:
            ready.setdefault(last[one.tensor], []).append(one)
    computing = {n for name, n in builder.resources.items() if name.startswith("compute:")}
    behind: dict[int, list[Kept]] = {}
    for place, following in itertools.pairwise([*sorted(ready), len(steps.rows) - 1]):
        computes = int(steps.rows[place, RESOURCE]) in computing
        behind.setdefault(place if computes else following, []).extend(ready[place])
    return steps.woven(
        [
            (place + 1, Rows.of(builder, [_update(builder, own)]))
            for place, own in sorted(behind.items())
        ]
    )


def _touched(builder: ProgramBuilder, steps: Rows) -> tuple[set[int], dict[int, int]]:
    """Return the values written, and by tensor the last place that touches it or its gradients."""
    rows, places = steps.rows, np.arange(len(steps.rows))
    last = np.full(len(builder.values), -1, dtype=np.int64)
    of_read: Ints = np.repeat(places, rows[:, READ])
    of_both: Ints = np.repeat(places, rows[:, HELD] + rows[:, WRITTEN])
    np.maximum.at(last, steps.read, of_read)
    np.maximum.at(last, steps.value, of_both)
    by_tensor: dict[int, int] = {}
    for value in np.flatnonzero(last >= 0).tolist():
        entry = builder.values[value]
        if entry.role in ("parameter", "master", "gradient"):
            by_tensor[entry.tensor] = max(by_tensor.get(entry.tensor, -1), int(last[value]))
    return set(steps.writes[0].tolist()), by_tensor


def _update(builder: ProgramBuilder, kept: Sequence[Kept]) -> Step:
    masters = tuple([one.master for one in kept])
    builder.updates.append(masters)
    return Step(
        kind=Kind.UPDATE,
        item=len(builder.updates) - 1,
        resource=f"compute:{kept[0].mesh}",
        reads=tuple([one.reduced for one in kept]),
        writes=masters,
        last_only=builder.strategy.updates == "ready",
    )
