"""How much of a known rule the finder finds again, when it is not told the rule."""

from __future__ import annotations

from shardwright.planner.space.iteration import Iteration
from shardwright.planner.space.rules import KIND
from shardwright.planner.space.rules.examples import EXAMPLES
from shardwright.planner.space.rules.normalisation import LOCAL_STATISTICS
from shardwright.planner.space.rules.notation import equation
from shardwright.runtime.rules import Case, draw
from shardwright.verbs.finder import propose
from shardwright.verbs.results import Proposal
from shardwright.verbs.rules import iteration_of

Column = tuple[tuple[int, ...], bool]


def columns(iteration: Iteration, case: Case) -> set[Column]:
    """Return the dims by what they cut, whatever their names: per tensor its dim, or -1."""
    tensors = (*iteration.inputs, *iteration.outputs)
    return {
        (
            tuple(names.index(dim.name) if dim.name in names else -1 for names in tensors),
            dim.name in iteration.mean,
        )
        for dim in iteration.dims
        # Halos cannot be written in the notation, so that nobody proposes them.
        if all(window.dim != dim.name for window in iteration.windows)
        if (case.kind, dim.name) not in LOCAL_STATISTICS
    }


def found_again(kind: str, cases: int = 2) -> tuple[Proposal, int, int, int]:
    """Return the proposal, how many dims all examples have, how many of them it has, and how many
    more it has."""
    proposal = propose(kind, EXAMPLES[kind], cases=cases)
    rules = [eval(line.partition(": ")[2][:-1], {"equation": equation}) for line in proposal.lines]
    total = again = more = 0
    for example in EXAMPLES[kind]:
        case = draw(kind, example)
        known = columns(iteration_of(case, KIND[kind]), case)
        found = [columns(iteration_of(case, rule), case) for rule in rules]
        best = max(found, key=lambda one: len(one & known), default=set())
        total, again, more = total + len(known), again + len(best & known), more + len(best - known)
    return proposal, total, again, more
