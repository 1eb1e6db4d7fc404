"""Cut a model into blocks: its repeated layers, and what lies before, between and after them."""

from __future__ import annotations

import hashlib
import string
from collections.abc import Sequence

from torch import nn

from shardwright.core.graph import Block, Operator, TensorSpec

# Operators between two layers join the second unless there are more of them than this; behind a layer that is a list
# of parts they join it: they are the sum that its own forward would end with.
GLUE = 4


def find_units(module: nn.Module) -> frozenset[str]:
    """Return the paths of the modules that make a block each.

    The elements of the outermost list in which some are alike in every parameter shape (so layers of
    a transformer, not its stages), or of modules numbered by name that are; without such a list the elements of any list; without any list
    the children of the module.
    """
    alike, others = _search(module, "")
    classes = {type(module.get_submodule(path)) for path in alike}
    same = [path for path in others if type(module.get_submodule(path)) in classes]
    units = [*alike, *same] or others
    path = ""
    while not units:
        children = {
            name: child for name, child in module.named_children() if _has_parameters(child)
        }
        if len(children) == 1:
            ((name, module),) = children.items()
            path = f"{path}{name}."
        else:
            units = [path + name for name in children] or [path.rstrip(".") or " "]
    return frozenset(units)


def _search(module: nn.Module, path: str) -> tuple[list[str], list[str]]:
    """Return the elements of outermost lists with equal elements, and of other lists."""
    children = dict(module.named_children())
    prefix = f"{path}." if path else ""
    elements = [name for name, child in children.items() if _has_parameters(child)]
    is_list = len(elements) > 1 and all(name.isdigit() for name in children)
    if is_list or _is_numbered(children):
        shapes = [parameter_shapes(children[name]) for name in elements]
        if len(set(shapes)) < len(shapes):
            return [prefix + name for name in elements], []
    alike: list[str] = []
    others: list[str] = []
    for name, child in children.items():
        inner_alike, inner_others = _search(child, prefix + name)
        alike += inner_alike
        others += inner_others
    if is_list and not alike:
        others = [prefix + name for name in elements]
    return alike, others


def _is_numbered(children: dict[str, nn.Module]) -> bool:
    """Whether modules of several parts each are called alike up to a number, as ``layer_0``, ``layer_1`` are."""
    stems = {name.rstrip(string.digits) for name in children}
    parts = (next(child.children(), None) for child in children.values())
    return len(stems) == 1 and stems.isdisjoint(children) and None not in parts


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def parameter_shapes(module: nn.Module) -> tuple[object, ...]:
    """Return a module's class, and the names and shapes of its parameters."""
    named = module.named_parameters(remove_duplicate=False)
    return (type(module), *((name, tuple(parameter.shape)) for name, parameter in named))


def cut_blocks(
    operators: Sequence[Operator],
    tensors: Sequence[TensorSpec],
    paths: Sequence[tuple[str, ...]],
    units: frozenset[str],
) -> tuple[Block, ...]:
    """Partition the operators, given the modules around each, into blocks in order."""
    owners = [
        next(filter(None, (_unit_of(path, units) for path in around)), "") for around in paths
    ]
    runs: list[tuple[str, int, int]] = []
    for index, owner in enumerate(owners):
        if runs and runs[-1][0] == owner:
            runs[-1] = (owner, runs[-1][1], index + 1)
        else:
            runs.append((owner, index, index + 1))
    parted = units.difference(path for around in paths for path in around)
    merged: list[tuple[str, int, int]] = []
    begin = -1
    for position, (owner, start, stop) in enumerate(runs):
        start = begin if begin >= 0 else start
        begin = -1
        is_between = 0 < position < len(runs) - 1
        is_glue = (
            not owner
            and is_between
            and stop - start <= GLUE
            and not _reads_parameter(operators[start:stop], tensors)
        )
        before = merged[-1][0] if merged else ""
        if before in parted and (is_glue or owner == before):
            merged[-1] = (before, merged[-1][1], stop)
        elif is_glue:
            begin = start
        else:
            merged.append((owner, start, stop))
    blocks: list[Block] = []
    for position, (owner, start, stop) in enumerate(merged):
        name = owner or _glue_name(position, len(merged))
        signature = sign(operators[start:stop], tensors, start)
        blocks.append(Block(name=name, start=start, stop=stop, signature=signature))
    return tuple(blocks)


def _unit_of(path: str, units: frozenset[str]) -> str:
    """Return the unit that a module is or lies in: a list or dict of parts is a layer whose own forward nobody calls."""
    names = path.split(".")
    prefixes = (".".join(names[:count]) for count in range(1, len(names) + 1))
    return next((prefix for prefix in prefixes if prefix in units), "")


def _glue_name(position: int, count: int) -> str:
    if position == 0:
        return "prelude"
    return "loss" if position == count - 1 else "between"


def _reads_parameter(operators: Sequence[Operator], tensors: Sequence[TensorSpec]) -> bool:
    return any(tensors[index].role == "parameter" for op in operators for index in op.inputs)


def sign(operators: Sequence[Operator], tensors: Sequence[TensorSpec], start: int) -> str:
    """Digest a block: kinds, attributes, shapes and inner wiring; tensors from outside by shape."""
    digest = hashlib.sha256()
    outside: dict[int, int] = {}
    for operator in operators:
        wires: list[object] = []
        for index in operator.inputs:
            tensor = tensors[index]
            if tensor.producer >= start:
                place = operators[tensor.producer - start].outputs.index(index)
                wires.append((tensor.producer - start, place))
            else:
                ordinal = outside.setdefault(index, len(outside))
                role = tensor.role
                wires.append((ordinal, role, tensor.shape, tensor.dtype, tensor.needs_gradient))
        outputs = [
            (tensors[index].shape, tensors[index].dtype, tensors[index].needs_gradient)
            for index in operator.outputs
        ]
        row = (operator.kind, operator.input_names, operator.attributes, wires, outputs)
        digest.update(repr(row).encode())
    return digest.hexdigest()[:16]
