"""Updates within backward, of the last microbatch or of each: of a parameter as soon as its gradient is
final, which then goes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from shardwright.core.program import Kind
from shardwright.planner.lower.builder import ProgramBuilder, Step
from shardwright.planner.lower.parameters import Kept


def with_updates(
    builder: ProgramBuilder, steps: Sequence[Step], kept: Sequence[Kept]
) -> list[Step]:
    """Return the steps of a mesh's backward with updates of the parameters ``kept`` there.

    A parameter is updated behind the last step that touches it or its gradients. Where that sends, the
    update comes with the next parameter's: until then what was sent has time to arrive.
    """
    last: dict[int, int] = {}
    written: set[int] = set()
    for place, step in enumerate(steps):
        written.update(step.writes)
        for value in (*step.reads, *step.writes):
            if builder.values[value].role in ("parameter", "master", "gradient"):
                last[builder.values[value].tensor] = place
    ready: dict[int, list[Kept]] = {}
    for one in kept:
        if one.reduced in written:
            ready.setdefault(last[one.tensor], []).append(one)
    behind: dict[int, list[Kept]] = {}
    for place, following in itertools.pairwise([*sorted(ready), len(steps) - 1]):
        computes = steps[place].resource.startswith("compute:")
        behind.setdefault(place if computes else following, []).extend(ready[place])
    result: list[Step] = []
    for place, step in enumerate(steps):
        result.append(step)
        if place in behind:
            result.append(_update(builder, behind[place]))
    return result


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
