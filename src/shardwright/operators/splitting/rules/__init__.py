"""How every kind of operator may be split: one rule per kind.

``KIND`` is the whole of it. To teach Shardwright an operator, add a word to a family's list or a
line such as ``"aten.mm.default": equation("self n k, mat2 k m -> n m")``, and an example call to
the file of the same name in ``examples``; ``shardwright verify-rules`` then runs it in pieces and
whole. A rule may only offer what the local kernel gives exactly; an operator without one runs
replicated.
"""

from __future__ import annotations

from functools import lru_cache

from shardwright.core.graph import OperatorGraph
from shardwright.operators.splitting.iteration import Iteration
from shardwright.operators.splitting.rules import (
    algebra,
    convolution,
    creation,
    indexing,
    losses,
    matrices,
    normalisation,
    pointwise,
    reductions,
    sequences,
    views,
)
from shardwright.operators.splitting.rules.signature import NotUnderstood, Rule, Signature, whole

KIND: dict[str, Rule] = {
    **pointwise.RULES,
    **algebra.RULES,
    **views.RULES,
    **reductions.RULES,
    **normalisation.RULES,
    **convolution.RULES,
    **losses.RULES,
    **creation.RULES,
    **indexing.RULES,
    **sequences.RULES,
    **matrices.RULES,
}
SEEN: dict[str, Rule] = {
    "pointwise": pointwise.pointwise,
    "bent": pointwise.pointwise,
    "rowwise": indexing.rowwise,
}


def iterate(graph: OperatorGraph, index: int, rule: Rule | None = None) -> Iteration:
    """Return the iteration space of an operator, by its kind's rule or another one.

    Equal calls share one answer.
    """
    operator = graph.operators[index]
    tensors = [graph.tensors[tensor] for tensor in operator.inputs]
    results = [graph.tensors[tensor] for tensor in operator.outputs]
    call = Signature(
        kind=operator.kind,
        names=operator.input_names,
        inputs=tuple([tensor.shape for tensor in tensors]),
        outputs=tuple([tensor.shape for tensor in results]),
        attributes=operator.attributes,
        dtypes=tuple([tensor.dtype for tensor in (*tensors, *results)]),
        are_parameters=tuple([tensor.role == "parameter" for tensor in tensors]),
    )
    return _iterate(call) if rule is None else _ask(rule, call)


def has_rule(kind: str) -> bool:
    """Whether operators of this kind may be split at all."""
    return _rule(kind) is not None


@lru_cache(maxsize=16384)
def _iterate(call: Signature) -> Iteration:
    return _ask(_rule(call.kind), call)


def _ask(rule: Rule | None, call: Signature) -> Iteration:
    if rule is None or not call.outputs:
        return whole(call)
    try:
        return rule(call)
    except NotUnderstood:
        return whole(call)


@lru_cache(maxsize=1024)
def _rule(kind: str) -> Rule | None:
    """Find the rule; an in-place variant (``add_``) has that of the operator it is made from."""
    if kind in KIND:
        return KIND[kind]
    space, _, rest = kind.partition(".")
    if space in SEEN:  # a function or module of the user's that capture has seen to be so
        return SEEN[space]
    name, dot, overload = rest.partition(".")
    return KIND.get(f"{space}.{name.removesuffix('_')}{dot}{overload}")
