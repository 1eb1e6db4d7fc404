"""Propose a rule for an operator that has none, by trying.

For every example call, at several random shapes: which dim of which tensor, cut at the same time,
gives pieces that make up the whole, forward and backward? What passes is written in the notation of
rules and checked again like any rule. Passing is evidence, not proof, so a proposal is printed to be
read and pasted by a person, and never used.

It can find what the notation can say: dims that tensors have in common, sums and means over dims,
terms that count once, and sums that pass through. Not merged or cut dims (views), nor kernels that
must know their offset.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

from shardwright.core.example import Call, Drawn, as_list
from shardwright.core.layout import PARTIAL, REPLICATE
from shardwright.errors import InputError
from shardwright.planner.space.iteration import Iteration
from shardwright.planner.space.rules import has_rule
from shardwright.planner.space.rules.examples import EXAMPLES
from shardwright.planner.space.rules.notation import equation
from shardwright.planner.space.rules.signature import Rule
from shardwright.runtime.rules import (
    Axis,
    Case,
    Refused,
    difference,
    draw,
    example_of,
    find_operator,
)
from shardwright.verbs.request import Watch
from shardwright.verbs.results import Proposal
from shardwright.verbs.rules import CASES, calls, check_kind, iteration_of
from shardwright.verbs.subject import capture

SHAPES = 4  # random ones per example
MOST_HYPOTHESES = 200  # per size, and per example
MOST_TERMS = 4  # to be tried as counted once


@dataclass(frozen=True, slots=True)
class Finding:
    """What one example call taught: how it may be cut, and which inputs sums pass through."""

    names: tuple[str, ...]
    inputs: tuple[tuple[str, ...], ...]
    outputs: tuple[tuple[str, ...], ...]
    once: frozenset[int]
    mean: tuple[str, ...]
    linear: tuple[int, ...]

    @property
    def line(self) -> tuple[str, str, str]:
        """The arguments of ``equation``: text, mean, linear."""
        terms = [
            " ".join(["+" * (at in self.once) + name, *(one or "_" for one in dims)])
            for at, (name, dims) in enumerate(zip(self.names, self.inputs, strict=True))
            if any(dims)
        ]
        results = [" ".join(one or "_" for one in dims) for dims in self.outputs]
        passing = " ".join(self.names[at] for at in self.linear)
        text = f"{', '.join(terms)} -> {', '.join(results)}".strip()
        return text, " ".join(self.mean), passing


def find_rules(
    kinds: Sequence[str] = (),
    model: str = "",
    *,
    cases: int = CASES,
    seed: int = 0,
    watch: Watch | None = None,
) -> tuple[Proposal, ...]:
    """Propose rules for these kinds by their examples, or for a model's operators by its calls.

    Raises InputError where a kind has no example call and no model shows one.
    """
    watch = watch or Watch()
    examples = _examples(kinds, model)
    found: list[Proposal] = []
    for at, (kind, known) in enumerate(examples.items()):
        watch.tell(f"looking for a rule of {kind}", at / len(examples))
        if watch.stop():
            break
        found.append(propose(kind, known, cases=cases, seed=seed))
    return tuple(found)


def propose(kind: str, examples: Sequence[Call], *, cases: int = CASES, seed: int = 0) -> Proposal:
    """Propose lines for the rules' table which together cover as many example calls as they can."""
    if kind.startswith("opaque."):  # its inside is not known here
        examples = ()
    else:
        find_operator(kind)
    random = Random(f"{seed} {kind}")
    findings = [_learn(kind, example, random) for example in examples]
    lines: list[str] = []
    num_cases = num_splits = 0
    left = [at for at, finding in enumerate(findings) if finding is not None]
    for text, mean, linear in _candidates([findings[at] for at in left]):
        rule = equation(text, mean=mean, linear=linear)
        covered = [
            at
            for at in left
            if _offers(findings[at], kind, examples[at], rule)
            and not check_kind(kind, (examples[at],), cases=2, seed=seed, rule=rule).problem
        ]
        if not covered:
            continue
        checked = check_kind(
            kind, [examples[at] for at in covered], cases=cases, seed=seed + 1, rule=rule
        )
        num_splits += checked.num_splits
        num_cases += checked.num_cases
        if not checked.problem:
            lines.append(f'"{kind}": {rule.__name__},')
            left = [at for at in left if at not in covered]
        if not left:
            break
    nothing = [at for at, one in enumerate(findings) if one is None and _has_dims(examples[at])]
    return Proposal(
        kind=kind,
        lines=tuple(lines),
        num_cases=num_cases,
        num_splits=num_splits,
        num_examples=len(examples),
        num_unexplained=len(nothing) + len(left),
    )


def _examples(kinds: Sequence[str], model: str) -> dict[str, tuple[Call, ...]]:
    if not model:
        if not kinds:
            raise InputError("say for which operators to look: kinds, or --model for all of one")
        known = {kind: EXAMPLES.get(kind, ()) for kind in kinds}
        without = [kind for kind, found in known.items() if not found]
        if without:
            raise InputError(
                f"{', '.join(without)} has no example call; name a model that uses it (--model), or "
                "add an example to planner/space/rules/examples"
            )
        return known
    captured = capture(model, global_batch=4)
    seen: dict[str, dict[str, Call]] = {}
    for index, operator in enumerate(captured.graph.operators):
        wanted = operator.kind in kinds if kinds else not has_rule(operator.kind)
        if wanted:
            example = example_of(captured, index)
            seen.setdefault(operator.kind, {}).setdefault(str(example), example)
    return {kind: tuple(found.values())[:6] for kind, found in seen.items()}


# -- one example ---------------------------------------------------------------------------------


def _learn(kind: str, example: Call, random: Random) -> Finding | None:
    """Try every way to cut a call; None where nothing may be cut or values cannot be compared.

    Nor where kernels do not look at shapes (``Call.fixed``): a wrong cut would end the process.
    """
    if example.fixed:
        return None
    try:
        cases = [case for case, _ in calls(kind, (example,), SHAPES, random, distinct=True)]
    except (InputError, Refused):
        return None
    first = cases[0]
    ranks = _ranks(first)
    cases = [case for case in cases if _ranks(case) == ranks and case.names == first.names]
    if first.is_random or not first.results:
        return None
    count = len(first.tensors)
    taken: set[tuple[int, int]] = set()
    found: list[tuple[tuple[int, ...], Axis]] = []
    for dims in itertools.islice(_hypotheses(cases), MOST_HYPOTHESES):
        used = {(tensor, dim) for tensor, dim in enumerate(dims) if dim >= 0}
        if used & taken:
            continue
        axis = _holds(cases, dims, count)
        if axis is not None:
            found.append((dims, axis))
            taken |= used
    linear = _linear(cases)
    if not found and not linear:
        return None
    return _write(first, sorted(found, key=lambda one: _order(one[0], count)), linear)


def _hypotheses(cases: Sequence[Case]) -> Iterator[tuple[int, ...]]:
    """Yield, per tensor, the dim to cut or -1: dims of the same size at all shapes, most first."""
    sizes: dict[tuple[int, ...], dict[int, list[int]]] = {}
    for tensor, rank in enumerate(_ranks(cases[0])):
        for dim in range(rank):
            size = tuple(_shapes(case)[tensor][dim] for case in cases)
            if min(size) > 1:
                sizes.setdefault(size, {}).setdefault(tensor, []).append(dim)
    count = len(_ranks(cases[0]))
    for places in sizes.values():
        options = [[*places.get(tensor, ()), -1] for tensor in range(count)]
        product = itertools.islice(itertools.product(*options), MOST_HYPOTHESES)
        yield from sorted(product, key=lambda dims: (dims.count(-1), dims))[: MOST_HYPOTHESES - 1]


def _holds(cases: Sequence[Case], dims: tuple[int, ...], count: int) -> Axis | None:
    """Return how the cut holds on all shapes: as it is, as a mean, or with terms counted once."""
    results = cases[0].results
    sums = [results[at] for at, dim in enumerate(dims[count:]) if dim < 0]
    if all(dim < 0 for dim in dims) or any(result.dtype.is_signed is False for result in sums):
        return None
    whole = [at for at, dim in enumerate(dims[:count]) if dim < 0]
    terms = [at for at in whole if cases[0].differentiable[at]] if sums else []
    options = [(False, ())] + ([(True, ())] if sums else [])
    options += [(False, (at,)) for at in terms[:MOST_TERMS]]
    for scale, once in options:
        axis = Axis(
            pieces=2,
            inputs=tuple((dim, dim) if dim >= 0 else (REPLICATE, PARTIAL) for dim in dims[:count]),
            outputs=tuple((dim, dim) if dim >= 0 else (PARTIAL, REPLICATE) for dim in dims[count:]),
            once=once,
            scale=scale,
        )
        if all(_passes(case, axis, dims) for case in cases):
            return axis
    return None


def _passes(case: Case, axis: Axis, dims: tuple[int, ...]) -> bool:
    shape, dim = next((s, d) for s, d in zip(_shapes(case), dims, strict=True) if d >= 0)
    pieces = next(count for count in range(2, shape[dim] + 1) if shape[dim] % count == 0)
    return difference(case, [replace(axis, pieces=pieces)])[0] <= 1


def _linear(cases: Sequence[Case]) -> tuple[int, ...]:
    """Return the inputs, as many as can be, through which a partial sum passes."""
    floats = [at for at, is_float in enumerate(cases[0].differentiable) if is_float]
    if not all(result.is_floating_point() for result in cases[0].results) or len(floats) > 6:
        return ()
    for size in range(len(floats), 0, -1):
        for chosen in itertools.combinations(floats, size):
            axis = Axis(
                pieces=2,
                inputs=tuple(
                    (PARTIAL, REPLICATE) if at in chosen else (REPLICATE, PARTIAL)
                    for at in range(len(cases[0].tensors))
                ),
                outputs=((PARTIAL, REPLICATE),) * len(cases[0].results),
            )
            if all(difference(case, [axis])[0] <= 1 for case in cases):
                return chosen
    return ()


def _write(
    case: Case, found: Sequence[tuple[tuple[int, ...], Axis]], linear: tuple[int, ...]
) -> Finding:
    """Name the dims: ``d0, d1`` where the result has them, ``k0, k1`` where it is a sum."""
    count = len(case.tensors)
    rows = [[""] * len(shape) for shape in _shapes(case)]
    numbers: Counter[str] = Counter()
    mean: list[str] = []
    for dims, axis in found:
        letter = "k" if min(dims[count:]) < 0 else "d"
        name = f"{letter}{numbers[letter]}"
        numbers[letter] += 1
        for row, dim in zip(rows, dims, strict=True):
            if dim >= 0:
                row[dim] = name
        mean += [name] if axis.scale else []
    named = [tuple(row) for row in rows]
    return Finding(
        names=case.names,
        inputs=tuple(named[:count]),
        outputs=tuple(named[count:]),
        once=frozenset(at for _, axis in found for at in axis.once),
        mean=tuple(mean),
        linear=linear,
    )


def _order(dims: tuple[int, ...], count: int) -> tuple[bool, tuple[int, ...]]:
    return min(dims[count:]) < 0, (*dims[count:], *dims[:count])


def _shapes(case: Case) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for tensor in (*case.tensors, *case.results)]


def _ranks(case: Case) -> tuple[int, ...]:
    return tuple(len(shape) for shape in _shapes(case))


# -- one line for several examples ---------------------------------------------------------------


def _candidates(findings: Sequence[Finding | None]) -> list[tuple[str, str, str]]:
    """Return lines to try, those first that name leading dims of any number."""
    lines: dict[tuple[str, str, str], None] = {}
    known = [finding for finding in findings if finding is not None]
    for finding in sorted(known, key=lambda one: -len(one.names)):
        for depth in range(max(map(len, finding.outputs)), 0, -1):
            general = _with_leading(finding, depth)
            if general is not None:
                lines[general.line] = None
                break
    for finding in known:
        lines[finding.line] = None
    return list(lines)


def _with_leading(finding: Finding, depth: int) -> Finding | None:
    """Write the first dims of the result as ``b..``, where all tensors have all or none of them."""
    lead = finding.outputs[0][:depth]
    if not all(lead) or any(name in finding.mean for name in lead):
        return None

    def change(dims: tuple[str, ...]) -> tuple[str, ...] | None:
        if not set(dims) & set(lead):
            return dims
        return ("b..", *dims[depth:]) if dims[:depth] == lead else None

    inputs, outputs = map(change, finding.inputs), map(change, finding.outputs)
    changed_in, changed_out = tuple(inputs), tuple(outputs)
    if any(dims is None for dims in (*changed_in, *changed_out)):
        return None
    return replace(finding, inputs=changed_in, outputs=changed_out)


def _has_dims(example: Call) -> bool:
    return any(
        isinstance(one, Drawn) and max(one.shape, default=1) > 1
        for value in (*example.args, *example.kwargs.values())
        for one in as_list(value) or (value,)
    )


def _offers(finding: Finding | None, kind: str, example: Call, rule: Rule) -> bool:
    """Whether a line splits the example into as many dims as were found for it alone."""
    if finding is None:
        return False
    iteration: Iteration = iteration_of(draw(kind, example), rule)
    found = {name for dims in (*finding.inputs, *finding.outputs) for name in dims if name}
    return len(iteration.dims) >= len(found) and set(iteration.linear) >= set(finding.linear)
