"""Which row of a batch every element of every tensor depends on, followed through a real run.

A module whose loops depend on data (the tokens that chose an expert) cannot be exported, and may still
compute every row by itself. Beside each tensor lies another of its shape that holds, for each element,
the row it was made from: ``FREE`` for none, ``MIXED`` for several. Views of the one are views of the
other, so that what is written through one is seen through all.

Which rows were picked (``nonzero``, masks) decides how long a tensor is and where a row stands in it. A
dim of that kind is *ragged*: nothing may ask for a place in it. What Python is told, a branch takes: see
``Answers``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwright.runtime.capture.counting import tensors_of

aten = torch.ops.aten
FREE, MIXED = -1, 1 << 40
NONE: frozenset[int] = frozenset()
Line = tuple[str, int]
# Whose code lies between the model's and this file's.
_BETWEEN = tuple(
    f"{Path(file).parents[up]}{os.sep}" for file, up in ((torch.__file__, 0), (__file__, 2))
)


class NotRows(Exception):
    """The run did something of which it is not known that rows stay apart."""


@dataclass
class Answers:
    """What Python is told where a truth value depends on rows: True, or False on the lines ``denied``.

    Whether other rows come to a branch must not matter to a row. So all branches that begin with
    "are there any" are taken, those that begin with "are there none" are not; that this gives what
    the run gives when nobody interferes is for the caller to see. Nothing is seen at a line where the
    answer was always the true one, nor where all elements or none were picked: ``asked`` says of
    each line whether it ever was otherwise.
    """

    denied: frozenset[Line] = frozenset()
    asked: dict[Line, bool] = field(default_factory=dict[Line, bool])

    def truth(self, natural: bool) -> bool:
        """Answer a question of the model's code."""
        line = line_of_model()
        self.note(line, natural != (line not in self.denied))
        return line not in self.denied

    def note(self, line: Line, is_other: bool) -> None:
        """Remember whether it was otherwise."""
        self.asked[line] = self.asked.get(line, False) or is_other


def line_of_model() -> Line:
    """Return the line of the model that is running."""
    frame = sys._getframe(2)
    while frame.f_back and frame.f_code.co_filename.startswith(_BETWEEN):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def joined(*owners: Tensor) -> Tensor:
    """Return the owner of what is made from several elements, place by place."""
    one = owners[0]
    for other in owners[1:]:
        one, other = torch.broadcast_tensors(one, other)
        agreed = torch.where((other == FREE) | (one == other), one, MIXED)
        one = torch.where(one == FREE, other, agreed)
    return one


def reduced(owner: Tensor, dims: Sequence[int], keepdim: bool = True) -> Tensor:
    """Return the owner of what is made from all elements along some dims."""
    if not dims:
        return owner
    if any(owner.shape[dim] == 0 for dim in dims):
        return owner.sum(list(dims), keepdim=keepdim).fill_(FREE)
    top = owner.amax(list(dims), keepdim=keepdim)
    low = torch.where(owner == FREE, MIXED, owner).amin(list(dims), keepdim=keepdim)
    return torch.where((top == FREE) | (low == top), top, MIXED)


class Owners:
    """What is known of the tensors of a run, and what Python is told of them."""

    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        self._known: dict[int, tuple[Tensor, Tensor, frozenset[int]]] = {}

    def enter(self, tensor: Tensor) -> None:
        """Let every row of a tensor (its first dim) belong to itself."""
        rows = torch.arange(tensor.shape[0]).view(-1, *[1] * (tensor.dim() - 1))
        self.keep(tensor, rows.expand(tensor.shape))

    def keep(self, tensor: Tensor, owner: Tensor, ragged: frozenset[int] = NONE) -> None:
        """Remember the owners of a new tensor, laid out as it is."""
        laid = torch.empty_strided(tensor.shape, tensor.stride(), dtype=torch.int64)
        self._known[id(tensor)] = (tensor, laid.copy_(owner.expand(tensor.shape)), ragged)

    def of(self, tensor: Tensor) -> Tensor:
        """Return a tensor's owners; one that was never seen belongs to nobody."""
        if id(tensor) not in self._known:
            self.keep(tensor, torch.tensor(FREE))
        return self._known[id(tensor)][1]

    def ragged(self, tensor: Tensor) -> frozenset[int]:
        """Return the dims of a tensor in which places depend on which rows were picked."""
        return self._known[id(tensor)][2] if id(tensor) in self._known else NONE

    def is_free(self, tensor: Tensor) -> bool:
        """Whether a tensor has nothing to do with any row."""
        return not self.ragged(tensor) and bool((self.of(tensor) == FREE).all())

    def view(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Let the owners of views be views of the owners."""
        base = args[0]
        owner = func(self.of(base), *args[1:], **kwargs)
        pairs = zip(tensors_of(result), tensors_of(owner), strict=True)
        for tensor, its in pairs:
            ragged = _moved(func, args, self.ragged(base), tensor) if self.ragged(base) else NONE
            self._known[id(tensor)] = (tensor, its, ragged)


# -- ragged dims through views ---------------------------------------------------------------------


def _moved(func: Any, args: Any, ragged: frozenset[int], result: Tensor) -> frozenset[int]:
    """Return the ragged dims of a view of a tensor that has some."""
    base, packet = args[0], func._overloadpacket
    rank = base.dim()
    if packet in (aten.alias, aten.detach, aten.expand):
        return frozenset(dim + result.dim() - rank for dim in ragged)
    if packet in (aten.t, aten.transpose, aten.permute):
        order = _order(packet, args, rank)
        return frozenset(order.index(dim) for dim in ragged)
    if packet in (aten.select, aten.unbind, aten.slice, aten.split, aten.split_with_sizes):
        at = _dim(func, args) % rank
        if at in ragged:
            raise NotRows("it asks for places among picked rows")
        gone = packet in (aten.select, aten.unbind)
        return frozenset(dim - (gone and dim > at) for dim in ragged)
    return _reshaped(base, ragged, result)


def _order(packet: Any, args: Any, rank: int) -> list[int]:
    """Return the dims of a tensor in the order in which its transpose has them."""
    if packet is aten.permute:
        return [dim % rank for dim in args[1]]
    order = list(range(rank))
    one, other = (0, rank - 1) if packet is aten.t else (args[1] % rank, args[2] % rank)
    order[one], order[other] = other, one
    return order


def _reshaped(base: Tensor, ragged: frozenset[int], result: Tensor) -> frozenset[int]:
    """Return where ragged dims are after a reshape that leaves them alone: all places where each may
    be, since sizes of 0 and 1 cannot be told apart."""
    found: set[int] = set()
    for dim in ragged:
        inner = base.shape[dim + 1 :].numel()
        places = [
            place
            for place, size in enumerate(result.shape)
            if size == base.shape[dim]
            and (result.shape[place + 1 :].numel() == inner or not result.numel())
        ]
        if not places and base.shape[dim] != 1:  # writes by index drop leading dims of one
            raise NotRows("it mixes picked rows with other dims")
        found.update(places)
    return frozenset(found)


def _dim(func: Any, args: Any) -> int:
    names = [argument.name for argument in func._schema.arguments]
    at = names.index("dim")
    return int(args[at]) if len(args) > at else 0
