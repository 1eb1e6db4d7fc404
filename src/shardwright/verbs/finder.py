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

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from shardwright.core.example import Call, Drawn, as_list
from shardwright.errors import InputError
from shardwright.operators.splitting import has_rule
from shardwright.operators.splitting.iteration import Iteration
from shardwright.operators.splitting.rules.notation import equation
from shardwright.operators.splitting.rules.signature import Rule
from shardwright.runtime.rules import (
    Answer,
    Case,
    Crashed,
    Differ,
    Split,
    draw,
    example_of,
    find_operator,
    is_crash,
    run_isolated,
)
from shardwright.verbs.cuts import Finding, learn
from shardwright.verbs.examples import EXAMPLES
from shardwright.verbs.request import Watch
from shardwright.verbs.results import Proposal, RuleCheck
from shardwright.verbs.rules import CASES, check_kind, iteration_of
from shardwright.verbs.subject import capture


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
    """Propose lines for the rules' table which together cover as many example calls as they can.

    All is tried in a child process: a cut that ends it is one that does not hold.
    """
    if kind.startswith("opaque."):  # its inside is not known here
        examples = ()
    else:
        find_operator(kind)

    def work(differ: Differ) -> Proposal:
        num_crashes = 0

        def counted(case: Case, split: Split) -> Answer:
            nonlocal num_crashes
            answer = differ(case, split)
            num_crashes += is_crash(answer)
            return answer

        found = _propose(kind, examples, cases, seed, counted)
        return replace(found, num_crashes=num_crashes)

    try:
        return run_isolated(work)
    except Crashed as error:
        return _nothing(kind, examples, str(error))


def _propose(
    kind: str, examples: Sequence[Call], cases: int, seed: int, differ: Differ
) -> Proposal:
    random = Random(f"{seed} {kind}")
    findings = [learn(kind, example, random, differ) for example in examples]
    lines: list[str] = []
    num_cases = num_splits = 0
    left = [at for at, finding in enumerate(findings) if finding is not None]

    def check(some: list[int], cases: int, seed: int, rule: Rule) -> RuleCheck:
        known = [examples[at] for at in some]
        return check_kind(kind, known, cases=cases, seed=seed, rule=rule, differ=differ)

    for text, mean, linear in _candidates([findings[at] for at in left]):
        rule = equation(text, mean=mean, linear=linear)
        offered = [at for at in left if _offers(findings[at], kind, examples[at], rule)]
        covered = [at for at in offered if not check([at], 2, seed, rule).problem]
        if not covered:
            continue
        checked = check(covered, cases, seed + 1, rule)
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


def _nothing(kind: str, examples: Sequence[Call], problem: str) -> Proposal:
    count = len(examples)
    return Proposal(
        kind=kind, lines=(), num_cases=0, num_splits=0, num_examples=count,
        num_unexplained=count, problem=problem,
    )  # fmt: skip


def _examples(kinds: Sequence[str], model: str) -> dict[str, tuple[Call, ...]]:
    """Return example calls by kind of operator: a model's, or those that are known."""
    if not model:
        return _known_examples(kinds)
    captured = capture(model, global_batch=4)
    seen: dict[str, dict[str, Call]] = {}
    for index, operator in enumerate(captured.graph.operators):
        wanted = operator.kind in kinds if kinds else not has_rule(operator.kind)
        if wanted:
            example = example_of(captured, index)
            seen.setdefault(operator.kind, {}).setdefault(str(example), example)
    return {kind: tuple(found.values())[:6] for kind, found in seen.items()}


def _known_examples(kinds: Sequence[str]) -> dict[str, tuple[Call, ...]]:
    if not kinds:
        raise InputError("say for which operators to look: kinds, or --model for all of one")
    known = {kind: EXAMPLES.get(kind, ()) for kind in kinds}
    without = [kind for kind, found in known.items() if not found]
    if without:
        raise InputError(
            f"{', '.join(without)} has no example call; name a model that uses it (--model), or "
            "add an example to verbs/examples"
        )
    return known


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
    """Whether a line cuts the example everywhere where cuts were found for it alone."""
    if finding is None:
        return False
    iteration: Iteration = iteration_of(draw(kind, example), rule)
    splittable = {dim.name for dim in iteration.dims if dim.size > 1}
    offered = _cuts((*iteration.inputs, *iteration.outputs), splittable)
    rows = (*finding.inputs, *finding.outputs)
    found = _cuts(rows, {name for dims in rows for name in dims if name})
    return offered >= found and set(iteration.linear) >= set(finding.linear)


def _cuts(tensors: Sequence[tuple[str, ...]], names: set[str]) -> set[tuple[int, ...]]:
    """Return, for each name, where every tensor has it, or -1."""
    return {tuple(dims.index(name) if name in dims else -1 for dims in tensors) for name in names}
