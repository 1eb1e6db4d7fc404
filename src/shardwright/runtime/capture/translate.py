"""Translate an exported graph into records of pure operators.

Walks ``torch.export``'s training IR once. Writes become new values, no-ops vanish, what is read in
no-grad regions is detached, losses that take a mean are taken apart into sum and count,
and many spellings of one thing (view, flatten, to) become one operator.
"""

from __future__ import annotations

import operator
from itertools import starmap
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from shardwright.runtime.capture import operators
from shardwright.runtime.capture.alone import can_be_alone, made_alone
from shardwright.runtime.capture.autocast import Region, entered
from shardwright.runtime.capture.bags import BAGS, summed
from shardwright.runtime.capture.composed import COMPOSED, parts
from shardwright.runtime.capture.decompose import Decompositions
from shardwright.runtime.capture.heads import MERGING, apart, there_and_back
from shardwright.runtime.capture.hooks import opaque_call
from shardwright.runtime.capture.inner import inner_written_out
from shardwright.runtime.capture.lists import is_over_lists, singly
from shardwright.runtime.capture.picks import diagonal_filled, shown
from shardwright.runtime.capture.pieces import joined
from shardwright.runtime.capture.record import (
    Recorder,
    Unsupported,
    Value,
    aten,
    map_values,
    shares_storage,
)
from shardwright.runtime.capture.spellings import (
    ADJOINT,
    CASTS,
    CHECKS,
    COPIES,
    PHYSICAL,
    RESHAPES,
    SKIPPED,
    UNCHECKED,
    only_checked,
)
from shardwright.runtime.capture.strides import picked
from shardwright.runtime.capture.transforms import written_out
from shardwright.runtime.capture.variables import Variable, Variables

_BORDERS = (
    torch._C._set_grad_enabled,
    torch.amp.autocast_mode._enter_autocast,
    torch.amp.autocast_mode._exit_autocast,
)
_STRICT = frozenset({aten.view.default, aten._unsafe_view.default})


class Translator:
    """Walks graphs; ``variables`` maps the nodes of the graph at hand to what they stand for."""

    def __init__(self, recorder: Recorder, *, synchronised: bool, prefix: str) -> None:
        self.recorder = recorder
        self.variables = Variables(recorder)
        self.prefix = prefix
        self.notes: dict[str, None] = {}
        self.regions: list[Region | None] = []
        self.decompositions = Decompositions(recorder, self.notes, synchronised)

    def walk(self, module: fx.GraphModule, entries: list[Any]) -> Any:
        """Translate one graph given its placeholders' variables; returns what its output names."""
        module = joined(picked(written_out(inner_written_out(module))))
        environment: dict[fx.Node, Any] = {}
        remaining = iter(entries)
        grad = torch.is_grad_enabled()
        unused = only_checked(module.graph)
        if any(str(node.target) in CHECKS for node in unused):
            self.notes[UNCHECKED] = None
        try:
            for node in module.graph.nodes:
                if node in unused:
                    continue
                if node.op == "placeholder":
                    environment[node] = next(remaining)
                elif node.op == "get_attr":
                    environment[node] = getattr(module, node.target)
                elif node.op == "output":
                    return fx.map_arg(node.args[0], lambda n: environment[n])
                else:
                    self._place(node)
                    args = fx.map_arg(node.args, lambda n: environment[n])
                    kwargs = fx.map_arg(node.kwargs, lambda n: environment[n])
                    environment[node] = self._call(node.target, args, kwargs)
        finally:
            torch.set_grad_enabled(grad)
        raise Unsupported("a graph without output")

    def _place(self, node: fx.Node) -> None:
        stack = node.meta.get("nn_module_stack")
        if stack:  # bookkeeping nodes have none: they belong where the last operator was
            paths = (path for path, _ in stack.values())
            self.recorder.path = tuple(
                path[len(self.prefix) :] for path in paths if path.startswith(self.prefix)
            )
        self.recorder.node_name = node.name

    def _call(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is operator.getitem:
            return args[0][args[1]]
        if target in _BORDERS:
            return self._cross(target, args)
        if isinstance(target, torch._ops.HigherOrderOperator):
            raise Unsupported(f"the higher-order operator {target.name()}")
        if not isinstance(target, torch._ops.OpOverload):
            raise Unsupported(f"the call {target}")
        if str(target) in SKIPPED:
            return None
        if target is aten.broadcast_tensors.default:
            return self._broadcast(args[0])
        if is_over_lists(target):
            return list(starmap(self._call, singly(target, args, kwargs)))
        args, kwargs = self._cast_for(target, args, kwargs)
        if target.namespace == "aten" and target._schema.is_mutable:
            return self._write(target, args, kwargs)
        return self._pure(target, args, kwargs)

    def _cross(self, target: Any, args: Any) -> None:
        """Begin or end a region of another grad mode, or of autocast."""
        if target is torch._C._set_grad_enabled:
            torch.set_grad_enabled(args[0])
        elif target is torch.amp.autocast_mode._enter_autocast:
            self.regions.append(entered(self.recorder, self.regions, *args))
        else:
            self.regions.pop()

    def _cast_for(self, target: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return arguments as autocast casts them where it is on."""
        region = self.regions[-1] if self.regions else None
        if region is None:
            return args, kwargs
        given = pytree.tree_map_only(Variable, self.variables.read, (list(args), kwargs))
        casts = region.casts_of(target, *given)

        def change(variable: Variable) -> Variable:
            made = casts.get(self.variables.read(variable))
            return variable if made is None else Variable(made)

        return pytree.tree_map_only(Variable, change, (args, kwargs))

    def _broadcast(self, tensors: list[Any]) -> list[Any]:
        """Expand each tensor to the common shape on its own, so that none depends on another."""
        shapes = [self.variables.read(one).meta.shape for one in tensors]
        full = torch.broadcast_shapes(*shapes)
        return [
            one if shape == full else self._pure(aten.expand.default, [one, list(full)], {})
            for one, shape in zip(tensors, shapes, strict=True)
        ]

    def _apart(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Translate what a call is composed of, under its own name."""
        given = [
            one for one in pytree.tree_leaves((list(args), kwargs)) if isinstance(one, Variable)
        ]
        look = pytree.tree_map_only(
            Variable, lambda one: self.variables.read(one).meta.detach(), (list(args), kwargs)
        )
        path, name = self.recorder.path, self.recorder.node_name
        made = self.walk(parts(target, *look), given)
        self.recorder.path, self.recorder.node_name = path, name
        return made

    # -- pure operators -------------------------------------------------------------------------

    def _pure(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Emit an operator and wrap its results, views of its arguments among them, as variables."""
        if target in COMPOSED:
            return self._apart(target, args, kwargs)
        sources: list[Variable] = []

        def read(item: Any) -> Any:
            if isinstance(item, Variable):
                sources.append(item)
                return self.variables.read(item)
            if isinstance(item, (list, tuple)):
                return [read(entry) for entry in item]
            return item

        values = [read(arg) for arg in args]
        named = {name: read(value) for name, value in kwargs.items()}
        target, values, named = self._canonical(target, values, named)
        if target is None:
            return Variable(self.recorder.cut(values[0]))
        if (copy := shown(self.recorder, target, values, named)) is not None:
            return Variable(copy)
        result = self._emit(target, values, named)
        if not isinstance(result, (Value, list)):
            return result
        rest = tuple(values[1:])
        if isinstance(result, Value):
            return self._wrap(result, sources, (target, rest, named, 0))
        return [
            self._wrap(value, sources, (target, rest, named, index))
            for index, value in enumerate(result)
        ]

    def _canonical(self, target: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Return the one spelling of an operator; a target of None means: a copy of its argument."""
        if _adds_nothing(target, args):
            return None, args, {}
        if target in COPIES and (
            target is not aten.contiguous.default or not args[0].meta.is_contiguous()
        ):
            return None, args, kwargs  # values never change, and reshape takes any strides
        if target in PHYSICAL or (target in ADJOINT and args[0].meta.is_complex()):
            return self._complex(target, args)
        if target is aten.take_along_dim.default and len(args) > 2 and args[2] is not None:
            return self._as_gather(args[0], args[1], args[2])
        if target is aten.linalg_norm.default and len(args) > 2 and len(args[2] or ()) == 1:
            order = 2.0 if args[1] is None else args[1]
            return aten.linalg_vector_norm.default, [args[0], order, *args[2:]], kwargs
        if can_be_alone(target, args):
            return made_alone(target, args, kwargs)
        if target in RESHAPES or target in CASTS:
            with torch.no_grad():
                metas = map_values(args, lambda value: value.meta)
                named = {
                    k: v for k, v in kwargs.items() if not isinstance(v, (Value, torch.device))
                }
                if target in CASTS:
                    metas = [m for m in metas if not isinstance(m, torch.device)] or metas
                    dtype = _cast_dtype(metas, named)
                    return aten.to.dtype, [args[0], dtype or args[0].meta.dtype], {}
                # A view of what was contiguous only because of a copy we dropped must not fail.
                lenient = aten.reshape.default if target in _STRICT else target
                made = lenient(*metas, **named)
                if made is metas[0]:  # flatten of one dim: what it is given, with its gradient
                    return aten.to.dtype, [args[0], made.dtype], {}
                shape = list(made.shape)
            return aten.reshape.default, [args[0], shape], {}
        if target is aten.squeeze.default:  # of a shard it might drop more
            ones = [dim for dim, extent in enumerate(args[0].meta.shape) if extent == 1]
            return aten.squeeze.dims, [args[0], ones], {}
        if target is aten.t.default and args[0].meta.dim() == 2:
            return aten.transpose.int, [args[0], 0, 1], {}
        if target in (aten.expand.default, aten.broadcast_to.default):
            shape = list(args[0].meta.expand(args[1]).shape)
            return aten.expand.default, [args[0], shape], {}
        return target, args, kwargs

    def _complex(self, target: Any, args: list[Any]) -> Any:
        """Return a call on complex numbers that leaves no mark, and takes pairs that lie apart."""
        if target in ADJOINT:
            args = [self.recorder.emit(aten.transpose.int, args[0], -2, -1)]
        return PHYSICAL.get(target, aten.conj_physical.default), args, {}

    def _as_gather(self, source: Value, index: Value, dim: int) -> Any:
        """Return ``gather`` of what ``take_along_dim`` reads, repeated where it would be broadcast."""
        found: list[Value] = []
        for value, other in ((source, index), (index, source)):
            shape = list(value.meta.shape)
            shape = [max(n, m) for n, m in zip(shape, other.meta.shape, strict=True)]
            shape[dim] = value.meta.shape[dim]
            found.append(self.recorder.emit(aten.expand.default, value, shape))
        return aten.gather.default, [found[0], dim, found[1]], {}

    def _wrap(self, value: Value, sources: list[Variable], view: Any) -> Variable:
        """Return the variable for a result: a known one, a view of a source, or a fresh one."""
        for source in sources:
            if source.value is value:
                return source
        for index, source in enumerate(sources):
            if shares_storage(source.value, value):
                known = view if index == 0 else None
                return Variable(value, source, known, source.root.version)
        return Variable(value)

    def _emit(self, target: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        rewrite = self.decompositions.of(target)
        if rewrite is not None:
            return rewrite(target, args, kwargs)
        if target is torch.ops.shardwright.opaque.default:
            return self._opaque(args)
        if target is torch.ops.shardwright.ctc_losses.default:
            return self.recorder.emit(operators.ctc_losses, *args, **kwargs)
        if target is torch.ops.shardwright.packed_recurrence.default:
            return self.recorder.emit(operators.packed_recurrence, *args, **kwargs)
        if target in BAGS:
            return summed(self.recorder, target, args, kwargs)
        is_reshape = target is aten.reshape.default
        short = there_and_back(self.recorder, *args) if is_reshape else None
        if target in MERGING:
            short = apart(self.recorder, target, args, kwargs)
        return self.recorder.cut(short) if short else self.recorder.emit(target, *args, **kwargs)

    # -- writes ---------------------------------------------------------------------------------

    def _write(self, target: Any, args: Any, kwargs: Any) -> Any:
        if "out" in kwargs:
            return self._write_out(target, args, kwargs)
        variable = args[0]
        name, overload = target._schema.name.split("::")[1], target._overloadname
        if not name.endswith("_") or not isinstance(variable, Variable):
            raise Unsupported(f"the operator {target}, which writes one of its arguments")
        if name == "detach_":
            variable.value = self.recorder.emit(aten.detach.default, self.variables.read(variable))
            return variable
        if torch.Tag.inplace_view in target.tags:
            raise Unsupported(f"the operator {target}, which changes what its argument looks at")
        if (
            name in ("add_", "sub_")
            and variable.buffer is not None
            and not isinstance(args[1], Variable)
        ):
            amount = args[1] * kwargs.get("alpha", 1)
            self._increment(variable, amount if name == "add_" else -amount)
            return variable
        before = self.variables.read(variable)
        values = [self._read_all(arg) for arg in args[1:]]
        named = {key: self._read_all(value) for key, value in kwargs.items()}
        after = self._functional(name, overload, before, values, named)
        return self._write_whole(variable, before, after)

    def _write_out(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Write the result of an operator's twin without ``out`` to what was given as ``out``."""
        variable, twin = kwargs["out"], _without_out(target)
        if not isinstance(variable, Variable) or twin is None:
            raise Unsupported(f"the operator {target}, which writes one of its arguments")
        values = [self._read_all(arg) for arg in args]
        named = {key: self._read_all(value) for key, value in kwargs.items() if key != "out"}
        before = self.variables.read(variable)
        return self._write_whole(variable, before, self.recorder.emit(twin, *values, **named))

    def _write_whole(self, variable: Variable, before: Value, after: Value) -> Variable:
        if after.meta.dtype != before.meta.dtype:
            after = self.recorder.emit(aten.to.dtype, after, before.meta.dtype)
        if after.meta.shape != before.meta.shape:
            after = self.recorder.emit(aten.expand.default, after, list(before.meta.shape))
        self.variables.write(variable, after)
        return variable

    def _read_all(self, item: Any) -> Any:
        if isinstance(item, Variable):
            return self.variables.read(item)
        if isinstance(item, (list, tuple)):
            return [self._read_all(entry) for entry in item]
        return item

    def _increment(self, variable: Variable, amount: float) -> None:
        self.variables.note_written(variable)
        before = self.variables.read(variable)
        with torch.no_grad():  # first the value for later readers, who must not add it twice
            variable.value = self.recorder.emit(aten.add.Scalar, before, amount)
        self.recorder.emit(operators.increment, variable.buffer, amount)
        variable.version += 1

    def _functional(
        self, name: str, overload: str, before: Value, args: list[Any], kwargs: dict[str, Any]
    ) -> Value:
        """Emit the pure twin of an in-place operator."""
        filled = self._filled(name, before, args, kwargs)
        if filled is not None:
            return filled
        twin = _twin(name, overload)
        if twin is aten.bernoulli.p and not (args or kwargs):
            args = [0.5]  # the default of the in-place form; the other has none
        found = shown(self.recorder, twin, [before, *args], kwargs)
        return found or self.recorder.emit(twin, before, *args, **kwargs)

    def _filled(
        self, name: str, before: Value, args: list[Any], kwargs: dict[str, Any]
    ) -> Value | None:
        """Return what is written where that does not depend on what stood there, or on a diagonal only."""
        if name in ("copy_", "fill_") and isinstance(args[0], Value):
            return self.recorder.cut(args[0])
        if name == "fill_":
            return self.recorder.emit(aten.full_like.default, before, args[0])
        if name == "zero_":
            return self.recorder.emit(aten.zeros_like.default, before)
        if name == "fill_diagonal_" and before.meta.dim() == 2 and not (args[1:] or kwargs):
            return diagonal_filled(self.recorder, before, args[0])
        return None

    def _opaque(self, args: list[Any]) -> Any:
        call, results = opaque_call(args[1], [value.meta for value in args[0]])
        if call.note:
            self.notes[call.note] = None
        return self.recorder.append(call, [args[0]], {}, results)


# Forms that leave their argument alone, where the name says less than that of the form in place.
_RENAMED = {
    "normal_": "normal_functional",
    "__ixor__": "__xor__", "__iand__": "__and__", "__ior__": "__or__",
}  # fmt: skip


def _twin(name: str, overload: str) -> Any:
    """Return the operator that makes what an in-place one would write."""
    renamed = _RENAMED.get(name, name[:-1])
    packet = getattr(aten, renamed, None)
    twin = getattr(packet, overload, None) or getattr(packet, "p", None)
    if twin is None:
        raise Unsupported(f"aten.{name} has no form that leaves its argument alone")
    return twin


def _without_out(target: Any) -> Any:
    """Return the overload of an operator that returns what this one writes to ``out``; None if there
    is none."""
    asked = [(one.name, str(one.type)) for one in target._schema.arguments if one.name != "out"]
    packet = target._overloadpacket
    for name in packet.overloads():
        found = getattr(packet, name)
        taken = [(one.name, str(one.type)) for one in found._schema.arguments]
        if taken == asked and not found._schema.is_mutable:
            return found
    return None


def _adds_nothing(target: Any, args: list[Any]) -> bool:
    """Whether a sum only begins: ``0 + loss`` and ``sum(losses)`` start from a plain zero, which
    would keep partial sums from passing."""
    if target is not aten.add.Tensor or isinstance(args[1], Value) or args[1] != 0:
        return False
    return args[0].meta.is_floating_point()


def _cast_dtype(args: list[Any], kwargs: dict[str, Any]) -> torch.dtype | None:
    for item in (*args[1:], *kwargs.values()):
        if isinstance(item, torch.dtype):
            return item
        if isinstance(item, torch.Tensor):
            return item.dtype
    return None
