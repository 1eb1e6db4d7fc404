"""Turn writes into new values: variables with aliases over values that never change.

A variable is what the exported program calls a tensor. Views know the variable they look at and how
to be taken again, so that a write through any alias is seen by all of them: it is carried to the
root by the inverse of each view (slice by slice_scatter, transpose by transpose), and stale views
are taken anew when next read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwright.runtime.capture.operators import assign, place_slice, straight
from shardwright.runtime.capture.record import Recorder, Unsupported, Value, aten

View = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], int]


@dataclass(eq=False, slots=True)
class Variable:
    """A tensor of the program. ``view`` is (operator, other arguments, keywords, which output).

    ``buffer`` is the module's own tensor where the variable is a buffer, or a frozen parameter: the one to
    write to. ``parameter`` is the name of one that the variable is; one that is trained only an
    optimizer may write.
    """

    value: Value
    parent: Variable | None = None
    view: View | None = None
    version: int = 0
    buffer: Value | None = None
    parameter: str = ""

    @property
    def root(self) -> Variable:
        """The variable that owns the memory."""
        return self if self.parent is None else self.parent.root


@dataclass
class Variables:
    """Reads and writes variables, emitting operators where an alias must be kept true. ``written``: the
    names of frozen parameters that were."""

    recorder: Recorder
    written: set[str] = field(default_factory=set)

    def read(self, variable: Variable) -> Value:
        """Return the present value."""
        parent, root = variable.parent, variable.root
        if parent is None or variable.version == root.version:
            return variable.value
        if variable.view is None:
            raise Unsupported("a read of a tensor whose memory was written in a way we cannot see")
        target, args, kwargs, output = variable.view
        result = self.recorder.emit(target, self.read(parent), *args, **kwargs)
        variable.value = result if isinstance(result, Value) else result[output]
        variable.version = root.version
        return variable.value

    def write(self, variable: Variable, value: Value, cut_off: bool = False) -> None:
        """Give a variable, and everything that shares its memory, a new value.

        What is written without gradients, or through a view that is cut off from them, is no part
        of a tensor's history: its gradient stays that of what stood there.
        """
        parent = variable.parent
        if not torch.is_grad_enabled() or cut_off:
            value = self._with_history(variable, value)
        if parent is None:
            self.note_written(variable)
            if variable.buffer is not None:
                self.recorder.emit(assign, variable.buffer, value)
            variable.value = value
            variable.version += 1
            return
        whole = self._put_back(variable, self.read(parent), value)
        is_detached = variable.view is not None and variable.view[0] is aten.detach.default
        self.write(parent, whole, cut_off or is_detached)
        variable.value, variable.version = value, variable.root.version

    def note_written(self, variable: Variable) -> None:
        """Keep the name of a frozen parameter that is written; refuse to write one that is trained."""
        if variable.parameter and variable.buffer is None:
            raise Unsupported(f"a write to the parameter {variable.parameter}")
        if variable.parameter:
            self.written.add(variable.parameter)

    def _with_history(self, variable: Variable, value: Value) -> Value:
        before = self.read(variable)
        if not before.meta.requires_grad or variable.parameter:
            return value
        with torch.enable_grad():
            return self.recorder.emit(straight, before, value)

    def _put_back(self, variable: Variable, whole: Value, part: Value) -> Value:
        """Return ``whole`` with the elements which the view shows replaced by ``part``."""
        if variable.view is None:
            raise Unsupported("a write to a tensor whose memory is shared in a way we cannot see")
        target, args, kwargs, _ = variable.view
        emit, shape = self.recorder.emit, list(whole.meta.shape)
        if whole.meta.numel() == part.meta.numel() and target in _ORDER_KEPT:
            return emit(aten.reshape.default, part, shape)
        if target is aten.transpose.int:
            return emit(target, part, *args, **kwargs)
        if target is aten.permute.default:
            order = [dim % len(shape) for dim in args[0]]
            return emit(target, part, [order.index(dim) for dim in range(len(order))])
        if target is aten.slice.Tensor:
            if whole.meta.is_complex():
                return emit(place_slice, whole, part, *args, **kwargs)
            return emit(aten.slice_scatter.default, whole, part, *args, **kwargs)
        if target is aten.select.int:
            return emit(aten.select_scatter.default, whole, part, *args, **kwargs)
        if target is aten.diagonal.default:
            return emit(aten.diagonal_scatter.default, whole, part, *args, **kwargs)
        raise Unsupported(f"a write through the view {target}")


# Views that keep the order of the elements.
_ORDER_KEPT = frozenset(
    {
        aten.reshape.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims,
        aten.unsqueeze.default, aten.detach.default, aten.alias.default, aten.view_as.default,
    }
)  # fmt: skip
