"""How much of a known rule the finder finds again, when it is not told the rule."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from shardwright.operators.splitting.iteration import Dim, Iteration
from shardwright.operators.splitting.rules import KIND
from shardwright.operators.splitting.rules.normalisation import LOCAL_STATISTICS
from shardwright.operators.splitting.rules.notation import equation
from shardwright.runtime.rules import Case, draw
from shardwright.verbs.examples import EXAMPLES
from shardwright.verbs.finder import propose
from shardwright.verbs.results import Proposal
from shardwright.verbs.rules import iteration_of

Column = tuple[tuple[int, ...], bool]


@dataclass(frozen=True, kw_only=True)
class Found:
    """The proposal for a kind, beside the table.

    Dims over all example calls: ``known`` by the table, found ``again``, and found though the table
    has no such dim (``more``). ``reasons`` say why known ones were not found. ``sums``: example
    calls through which partial sums pass by the table, and by the proposal.
    """

    proposal: Proposal
    known: int
    again: int
    more: int
    reasons: Counter[str]
    sums: tuple[int, int]


def columns(iteration: Iteration, case: Case) -> dict[Column, Dim]:
    """Return the dims by what they cut, whatever their names: per tensor its dim, or -1."""
    tensors = (*iteration.inputs, *iteration.outputs)
    is_trained = case.arguments.get("training") is not False
    return {
        (
            tuple(names.index(dim.name) if dim.name in names else -1 for names in tensors),
            dim.name in iteration.mean,
        ): dim
        for dim in iteration.dims
        if dim.size > 1 and not (is_trained and (case.kind, dim.name) in LOCAL_STATISTICS)
    }


def found_again(kind: str, cases: int = 2) -> Found:
    """Hide the rule of a kind, look for one, and compare."""
    proposal = propose(kind, EXAMPLES[kind], cases=cases)
    rules = [eval(line.partition(": ")[2][:-1], {"equation": equation}) for line in proposal.lines]
    known_count = again = more = known_sums = found_sums = 0
    reasons: Counter[str] = Counter()
    for example in EXAMPLES[kind]:
        case = draw(kind, example)
        iteration = iteration_of(case, KIND[kind])
        known = columns(iteration, case)
        offers = [iteration_of(case, rule) for rule in rules]
        found = [set(columns(offer, case)) for offer in offers]
        best = max(found, key=lambda one: (len(one & known.keys()), -len(one)), default=set())
        known_count, again = known_count + len(known), again + len(best & known.keys())
        more += len(best - known.keys())
        reasons.update(_reason(iteration, case, known[one], one) for one in known.keys() - best)
        known_sums += bool(iteration.linear)
        found_sums += any(set(offer.linear) >= set(iteration.linear) for offer in offers) and bool(
            iteration.linear
        )
    return Found(
        proposal=proposal,
        known=known_count,
        again=again,
        more=more,
        reasons=reasons,
        sums=(known_sums, found_sums),
    )


def _reason(iteration: Iteration, case: Case, dim: Dim, column: Column) -> str:
    """Say what the notation, or a test of values, lacks for a dim."""
    if case.is_random:
        return "values are drawn at random"
    if any(window.dim == dim.name for window in iteration.windows):
        return "pieces need halos"
    if dim.name == iteration.offset:
        return "the kernel must know its offset"
    shapes = [tuple(tensor.shape) for tensor in (*case.tensors, *case.results)]
    cut = [shape[at] for shape, at in zip(shapes, column[0], strict=True) if at >= 0]
    if any(size != dim.size for size in cut):
        return "dims are merged or cut"
    return "the notation has it, the finder does not"
