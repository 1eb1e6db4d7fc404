"""An operator's iteration space: named dims, and how each tensor indexes them.

This is the whole language in which an operator says how it may be split. ``linear`` is
``b s k, n k, n -> b s n``. From an assignment of mesh axes to dim names everything else follows:

* a tensor that has the dim is sharded along it, value and gradient alike;
* a tensor that lacks the dim is replicated; where it is an input its gradient is a partial sum;
* an output that lacks a dim some input has is a partial sum, and its gradient is replicated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Role = Literal["sample", "attribute", "parameter", "reduction"]

PLUS = "+"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dim:
    """A direction of the iteration space.

    It splits into any number of equal pieces that divides ``size``, but at most ``most`` where that
    is not 0 (pieces of an image must not be smaller than their halos).
    """

    name: str
    size: int
    role: Role
    most: int = 0

    def splits(self, pieces: int) -> bool:
        """Whether it can be split into so many pieces."""
        return self.size % pieces == 0 and (self.most == 0 or pieces <= self.most)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What a piece of the first input needs of its neighbours along ``dim`` (see ``core.halo``)."""

    dim: str
    before: int
    after: int
    fill: float = 0.0


def pieces_by_dim(names: Sequence[str], sizes: Sequence[int]) -> dict[str, int]:
    """Return into how many pieces axes of these sizes split the dims that they are assigned to."""
    pieces: dict[str, int] = {}
    for name, size in zip(names, sizes, strict=True):
        if name not in ("", PLUS):
            pieces[name] = pieces.get(name, 1) * size
    return pieces


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """The iteration space of one operator.

    ``inputs`` and ``outputs`` give, per tensor and tensor dim, the name of the iteration dim it
    follows, or "" where it may not be split. A tensor dim may be larger than its iteration dim (the
    major factor of a merged dim: splitting ``h`` splits ``(h d)`` into equal contiguous pieces).

    ``once``: input positions that a partial result must count once (a bias). ``mean``: reduction
    dims over which the operator takes a mean, so that a split must scale the result by 1/pieces.
    ``linear``: input positions through which a partial sum may pass (the operator is linear in them
    jointly, the other inputs being replicated); splitting the pseudo dim ``+`` means just that.
    ``offset``: the dim whose shard offset the kernel must know, or "". ``windows``: the dims along
    which the operator slides over its first input, so that pieces need halos.
    """

    dims: tuple[Dim, ...]
    inputs: tuple[tuple[str, ...], ...]
    outputs: tuple[tuple[str, ...], ...]
    once: tuple[int, ...] = ()
    mean: tuple[str, ...] = ()
    linear: tuple[int, ...] = ()
    offset: str = ""
    windows: tuple[Window, ...] = ()

    def __post_init__(self) -> None:
        known = {dim.name for dim in self.dims}
        used = {name for names in (*self.inputs, *self.outputs) for name in names if name}
        if not used <= known:
            raise ValueError(f"tensors use unknown dims {sorted(used - known)}")
        for names in (*self.inputs, *self.outputs):
            named = [name for name in names if name]
            if len(named) != len(set(named)):
                raise ValueError(f"a tensor uses a dim twice: {names}")

    def dim(self, name: str) -> Dim:
        """Return a dim by name."""
        return next(dim for dim in self.dims if dim.name == name)

    def met(self, inputs: Sequence[int], lying: Mapping[int, int]) -> list[str]:
        """Return what it calls the dims along which an axis splits its inputs, of those that ``lying``
        has by tensor; "" where it does not let them be split."""
        return [
            names[lying[tensor]]
            for tensor, names in zip(inputs, self.inputs, strict=True)
            if tensor in lying
        ]

    def handed_on(self, outputs: Sequence[int], name: str) -> dict[int, int]:
        """Return along which of their dims an axis splits the outputs that have the dim ``name``."""
        return {
            tensor: names.index(name)
            for tensor, names in zip(outputs, self.outputs, strict=True)
            if name in names
        }

    def summed_axes(self, dims: Sequence[str], sizes: Sequence[int]) -> tuple[int, ...]:
        """Return the axes of several devices over which results are partial, where axes split these dims."""
        return tuple(
            axis
            for axis, (name, size) in enumerate(zip(dims, sizes, strict=True))
            if size > 1 and name not in ("", PLUS) and self.is_reduction(name)
        )

    def offset_dim(self, dims: Sequence[str]) -> int:
        """Return along which of its dims a tensor's shard has the offset that the kernel must know where
        axes split these dims; -1 where none must be known."""
        if not self.offset or self.offset not in dims:
            return -1
        return next(names.index(self.offset) for names in self.inputs if self.offset in names)

    def is_reduction(self, name: str) -> bool:
        """Whether some output lacks the dim, so that splitting it leaves partial sums."""
        return any(name not in names for names in self.outputs)
