"""Rules written as one line, in the manner of einsum.

``"input b.. k, weight n k, +bias n -> b.. n"`` reads: the argument called ``input`` has any number
of leading dims and then ``k``; ``weight`` has ``n`` and ``k``; ``bias`` has ``n`` and is counted
once by a partial result; the output has the leading dims and ``n``. A dim missing from the output
is summed over. ``_`` is a dim that may not be split and ``_..`` any number of those. An argument
that is not mentioned may not be split at all, one that is absent from the call is passed over.
Several outputs are separated by commas.
"""

from __future__ import annotations

from dataclasses import replace

from shardwright.operators.splitting.iteration import Iteration
from shardwright.operators.splitting.rules.signature import (
    Names,
    NotUnderstood,
    Rule,
    Signature,
    leading,
    space,
)


def equation(text: str, *, offset: str = "", mean: str = "", linear: str = "") -> Rule:
    """Turn one line of the notation into a rule.

    ``offset``, ``mean`` (names of dims) and ``linear`` (names of arguments) are as in ``Iteration``,
    several names separated by spaces.
    """
    left, _, right = text.partition("->")
    arguments: dict[str, Names] = {}
    added: list[str] = []
    for term in filter(str.strip, left.split(",")):
        name, *names = term.split()
        if name.startswith("+"):
            name = name[1:]
            added.append(name)
        arguments[name] = tuple(names)
    results = tuple(tuple(term.split()) for term in right.split(","))

    def rule(call: Signature) -> Iteration:
        if len(results) != len(call.outputs):
            raise NotUnderstood(f"{call.kind} has {len(call.outputs)} outputs")
        terms = [*(arguments.get(name, ("_..",)) for name in call.names), *results]
        pairs = list(zip(terms, (*call.inputs, *call.outputs), strict=True))
        widths = {len(shape) - len(names) + 1 for names, shape in pairs if "b.." in names}
        if len(widths) > 1:
            raise NotUnderstood(f"{call.kind}: leading dims of different number")
        tensors = [_expand(names, len(shape)) for names, shape in pairs]
        inputs, outputs = tensors[: len(call.inputs)], tensors[len(call.inputs) :]
        once = tuple(index for index, name in enumerate(call.names) if name in added)
        passing = tuple(index for index, name in enumerate(call.names) if name in linear.split())
        iteration = space(call, inputs, outputs, once=once, mean=mean.split(), linear=passing)
        is_offset = any(dim.name == offset for dim in iteration.dims)
        return replace(iteration, offset=offset) if is_offset else iteration

    options = {"offset": offset, "mean": mean, "linear": linear}
    written = [f'"{text}"', *(f'{key}="{value}"' for key, value in options.items() if value)]
    rule.__name__ = f"equation({', '.join(written)})"
    return rule


def _expand(names: Names, rank: int) -> Names:
    """Write ``b..`` and ``_..`` out for a tensor of a rank."""
    expanded: list[str] = []
    for name in names:
        if name == "_..":
            expanded += [""] * (rank - len(names) + 1)
        elif name == "b..":
            expanded += leading(rank - len(names) + 1)
        else:
            expanded.append("" if name == "_" else name)
    return tuple(expanded)
