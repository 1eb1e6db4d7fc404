"""Check the rules: every operator in pieces against whole, over random shapes and legal splits.

The rules say how an operator may be split, their examples how it is called; the runtime runs both.
Everything drawn at random follows from the seed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from random import Random

from shardwright.core.example import Call
from shardwright.errors import InputError
from shardwright.operators.splitting.iteration import PLUS, Dim, Iteration
from shardwright.operators.splitting.rules import KIND, iterate
from shardwright.operators.splitting.rules.normalisation import LOCAL_STATISTICS
from shardwright.operators.splitting.rules.signature import Rule
from shardwright.planner.space.configs import placements
from shardwright.runtime.rules import (
    Axis,
    Case,
    Crashed,
    Differ,
    Refused,
    difference,
    draw,
    run_isolated,
)
from shardwright.verbs.examples import EXAMPLES
from shardwright.verbs.examples.resize import is_small, resized
from shardwright.verbs.request import Watch
from shardwright.verbs.results import RuleCheck, RuleChecks

CASES = 8  # random shapes per rule
TRIES = 12  # of a random shape, until torch takes the call
PAIRS = 6  # of dims split at once, per shape
PIECES = (2, 3, 4)
MOST_PIECES = 32  # of a dim, so that pairs stay quick, too


def verify_rules(
    kinds: Sequence[str] = (), *, cases: int = CASES, seed: int = 0, watch: Watch | None = None
) -> RuleChecks:
    """Check the rules of these kinds, or of all, and return one line for each.

    Raises InputError for a kind that has no rule.
    """
    unknown = sorted(set(kinds) - set(KIND))
    if unknown:
        raise InputError(
            f"{', '.join(unknown)} has no rule to verify; kinds are written as `shardwright "
            f"capture` prints them, and `shardwright verify-rules --find {unknown[0]}` proposes one"
        )
    wanted = sorted(kinds or KIND)
    watch = watch or Watch()
    rows: list[RuleCheck] = []
    for at, kind in enumerate(wanted):
        watch.tell(f"verifying {kind}", at / len(wanted))
        if watch.stop():
            break
        rows.append(_check_isolated(kind, cases, seed))
    return RuleChecks(rows=tuple(rows), seed=seed, is_complete=len(rows) == len(wanted))


def _check_isolated(kind: str, cases: int, seed: int) -> RuleCheck:
    """Check a kind in a child process, which a wrong rule may end."""
    examples = EXAMPLES.get(kind, ())
    try:
        return run_isolated(
            lambda differ: check_kind(kind, examples, cases=cases, seed=seed, differ=differ)
        )
    except Crashed as error:
        return RuleCheck(
            kind=kind, rule=_name(KIND[kind]), num_cases=0, num_splits=0, difference=math.inf,
            problem=f"{kind}: {error}",
        )  # fmt: skip


def check_kind(
    kind: str,
    examples: Sequence[Call],
    *,
    cases: int = CASES,
    seed: int = 0,
    rule: Rule | None = None,
    differ: Differ = difference,
) -> RuleCheck:
    """Check one kind's rule, or another rule in its place, on its examples and at random sizes."""
    name = _name(rule or KIND[kind])
    if not examples:
        return RuleCheck(
            kind=kind, rule=name, num_cases=0, num_splits=0, difference=0.0, problem=_no_example()
        )
    random = Random(f"{seed} {kind}")
    num_cases = num_splits = 0
    worst = 0.0
    for case, call in calls(kind, examples, cases, random):
        iteration = iteration_of(case, rule)
        num_cases += 1
        for split in splits(iteration, case, random):
            gap, where = differ(case, [axis_of(iteration, *one) for one in split])
            num_splits += 1
            worst = max(worst, gap)
            if gap > 1:
                problem = f"{kind}{call} split {text_of(split)}: {where}"
                return RuleCheck(
                    kind=kind, rule=name, num_cases=num_cases, num_splits=num_splits,
                    difference=worst, problem=problem,
                )  # fmt: skip
    return RuleCheck(
        kind=kind, rule=name, num_cases=num_cases, num_splits=num_splits, difference=worst
    )


def calls(
    kind: str, examples: Sequence[Call], cases: int, random: Random, *, distinct: bool = False
) -> Iterator[tuple[Case, Call]]:
    """Yield the examples as they are written, then as many at random sizes."""
    for at in range(len(examples) + cases):
        example = examples[at % len(examples)]
        for _ in range(1 if at < len(examples) else TRIES):
            call = example if at < len(examples) else resized(example, random, distinct=distinct)
            if at >= len(examples) and not is_small(call):
                continue
            case = draw(kind, call, random.getrandbits(32))
            try:
                _ = case.results
            except Refused as error:
                if at < len(examples):
                    raise InputError(
                        f"torch does not take the example {kind}{call}: {error}; correct it"
                    ) from error
                continue
            yield case, call
            break


def iteration_of(case: Case, rule: Rule | None = None) -> Iteration:
    """Ask the rule of the case's kind, or another one."""
    return iterate(case.graph, 0) if rule is None else iterate(case.graph, 0, rule)


def splits(
    iteration: Iteration, case: Case, random: Random
) -> Iterator[tuple[tuple[str, int], ...]]:
    """Yield legal splits: every dim by 2, 3 and 4, partial sums, and some pairs of these.

    None where values cannot be compared, and not those that change the result on purpose.
    """
    if case.is_random:
        return
    counts = {dim.name: found for dim in iteration.dims if (found := _counts(dim, case))}
    if iteration.linear and all(case.tensors[at].is_floating_point() for at in iteration.linear):
        counts[PLUS] = [2]
    for name, found in counts.items():
        for pieces in found:
            yield ((name, pieces),)
    pairs = list(itertools.permutations(counts, 2))
    for first, second in random.sample(pairs, min(PAIRS, len(pairs))):
        yield (first, random.choice(counts[first])), (second, random.choice(counts[second]))


def _counts(dim: Dim, case: Case) -> list[int]:
    """Return the numbers of pieces to try; none where each piece has statistics of its own on purpose."""
    if (case.kind, dim.name) in LOCAL_STATISTICS and case.arguments.get("training") is not False:
        return []
    counts = dict.fromkeys((*PIECES, dim.size))
    return [pieces for pieces in counts if dim.splits(pieces) and pieces <= MOST_PIECES]


def axis_of(iteration: Iteration, name: str, pieces: int) -> Axis:
    """Return what splitting one dim means for every tensor, as lowering would write it."""
    found = placements(iteration, (name,))
    offset = -1
    if name == iteration.offset:
        offset = next(names for names in iteration.inputs if name in names).index(name)
    is_partial = name != PLUS and iteration.is_reduction(name)
    return Axis(
        pieces=pieces,
        inputs=tuple((pair.value[0], pair.gradient[0]) for pair in found.inputs),
        outputs=tuple((pair.value[0], pair.gradient[0]) for pair in found.outputs),
        once=iteration.once if is_partial else (),
        scale=name in iteration.mean,
        offset_dim=offset,
        halo=next(iter(found.inputs[0].halos), None) if found.inputs else None,
    )


def text_of(split: Sequence[tuple[str, int]]) -> str:
    """Say how a split cuts, as in ``d0 by 2, d1 by 3``."""
    return ", ".join(
        f"{'partial sums' if name == PLUS else name} by {pieces}" for name, pieces in split
    )


def _name(rule: Rule) -> str:
    return getattr(rule, "__name__", type(rule).__name__)


def _no_example() -> str:
    return "no example call: add one to verbs/examples, in the file that is called as the rule's"
