"""How operators hand owners of rows on (``owners``), and the mode under which a run is followed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.runtime.capture.counting import tensors_of, written_by
from shardwright.runtime.capture.lying import memory_of
from shardwright.runtime.capture.owners import (
    FREE,
    MIXED,
    NONE,
    NotRows,
    Owners,
    joined,
    line_of_model,
    reduced,
)

aten = torch.ops.aten


class Following(TorchDispatchMode):
    """Follows rows through everything that runs. ``fixed`` may not be written. Raises NotRows."""

    def __init__(self, owners: Owners, fixed: Sequence[Tensor]) -> None:
        super().__init__()
        self.owners = owners
        self.fixed = {memory_of(tensor) for tensor in fixed}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named, packet = kwargs or {}, func._overloadpacket
        if func is aten._local_scalar_dense.default:
            return self._told(args[0])
        written = self._check(func, args, named)
        if packet in _PICKS:
            return _PICKS[packet](self.owners, func, args, named)
        if packet not in RULES and not written and self._is_free(args, named):
            return func(*args, **named)
        result = func(*args, **named)
        if func.is_view:
            self.owners.view(func, args, named, result)
        else:
            _rule(func, written)(self.owners, func, args, named, result)
        return result

    def _check(self, func: Any, args: Any, named: Any) -> list[Tensor]:
        """Return what an operator writes, and refuse random numbers."""
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise NotRows(f"{func} draws random numbers")
        written = written_by(func, args, named)
        if any(memory_of(one) in self.fixed for one in written):
            raise NotRows(f"{func} writes what it was given")
        return written

    def _is_free(self, args: Any, named: Any) -> bool:
        return all(map(self.owners.is_free, tensors_of((args, named))))

    def _told(self, tensor: Tensor) -> Any:
        told = aten._local_scalar_dense.default(tensor)
        if self.owners.is_free(tensor):
            return told
        if tensor.dtype != torch.bool:
            raise NotRows("Python is told a number that depends on rows")
        return self.owners.answers.truth(bool(told))


class Seen(TorchFunctionMode):
    """Keeps from Python what would pass by ``Owners``, and checks of values that ask for them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("tolist", "numpy", "__array__", "data_ptr"):
            raise NotRows("Python is told numbers")
        if func is F.one_hot and len(args) + len(kwargs or {}) == 2:
            values, classes = (*args, *(kwargs or {}).values())
            return (values.unsqueeze(-1) == torch.arange(classes)).long()
        return func(*args, **(kwargs or {}))


# -- rules ----------------------------------------------------------------------------------------


def _aligned(owners: Owners, tensors: Sequence[Tensor], rank: int) -> frozenset[int]:
    """Return the ragged dims of what tensors give that are broadcast to each other."""
    return frozenset(
        dim + rank - tensor.dim() for tensor in tensors for dim in owners.ragged(tensor)
    )


def _pointwise(owners: Owners, func: Any, args: Any, named: Any, result: Any) -> None:
    given = tensors_of((args, named))
    if torch.Tag.pointwise not in func.tags and func._overloadpacket is aten.copy_:
        given = given[1:]  # what stood there is gone
    owner = joined(*map(owners.of, given)) if given else torch.tensor(FREE)
    for one in tensors_of(result):
        ragged = _aligned(owners, given, one.dim())
        if any(one is tensor for tensor in written_by(func, args, named)):
            if ragged - owners.ragged(one):
                raise NotRows("it writes picked rows to places by number")
            owners.of(one).copy_(owner.expand(one.shape))
        else:
            owners.keep(one, owner, ragged)


def _made(owners: Owners, func: Any, args: Any, named: Any, result: Any) -> None:
    """What is made in a tensor's likeness has its shape only."""
    if written_by(func, args, named):
        owners.of(result).fill_(FREE)
    else:
        owners.keep(result, torch.tensor(FREE), _aligned(owners, [args[0]], result.dim()))


def _product(owners: Owners, func: Any, args: Any, named: Any, result: Any) -> None:
    """Products of matrices: an element is made from a row of the one and a column of the other."""
    packet = func._overloadpacket
    *added, one, other = args if packet in (aten.addmm, aten.baddbmm) else args[:2]
    if packet is aten.linear:
        one, other, *added = args
        other = owners.of(other).t()
        right = reduced(other, [0], False)
        ragged: frozenset[int] = NONE
    else:
        right = reduced(owners.of(other), [-2])
        ragged = frozenset(dim for dim in owners.ragged(other) if dim != other.dim() - 2)
        _check_apart(owners, other, [other.dim() - 2])
    _check_apart(owners, one, [one.dim() - 1])
    left = reduced(owners.of(one), [-1])
    terms = [owners.of(tensor) for tensor in added if isinstance(tensor, Tensor)]
    owners.keep(result, joined(left, right, *terms), ragged | owners.ragged(one))


def _check_apart(owners: Owners, tensor: Tensor, dims: Sequence[int]) -> None:
    if owners.ragged(tensor) & {dim % tensor.dim() for dim in dims}:
        raise NotRows("it computes over picked rows")


def _dims(func: Any, args: Any, named: Any) -> tuple[list[int], bool]:
    """Return the dims of a reduction and whether they are kept."""
    names = [argument.name for argument in func._schema.arguments]
    bound = dict(zip(names, args, strict=False)) | named
    dims = bound.get("dim")
    rank = args[0].dim()
    if dims is None or dims == []:
        dims = list(range(rank))
    dims = [dims] if isinstance(dims, int) else dims
    return [dim % rank for dim in dims] if rank else [], bool(bound.get("keepdim", False))


def _reduction(owners: Owners, func: Any, args: Any, named: Any, result: Any) -> None:
    dims, keeps = _dims(func, args, named)
    ragged, owner = owners.ragged(args[0]), reduced(owners.of(args[0]), dims, keeps)
    if ragged & set(dims):
        owner = torch.full_like(owner, MIXED)
    left = [dim for dim in range(args[0].dim()) if keeps or dim not in dims]
    places = frozenset(left.index(dim) for dim in ragged - set(dims))
    for one in tensors_of(result):
        owners.keep(one, owner, places)


def _along(owners: Owners, func: Any, args: Any, named: Any, result: Any) -> None:
    """Every element of the result is made from all along one dim (softmax, sorts, running sums)."""
    names = [argument.name for argument in func._schema.arguments]
    bound = dict(zip(names, args, strict=False)) | named
    dim = bound.get("dim", -1)
    _check_apart(owners, args[0], [dim])
    owner = reduced(owners.of(args[0]), [dim % args[0].dim()])
    for one in tensors_of(result):
        owners.keep(one, owner, owners.ragged(args[0]))


def _norm(owners: Owners, func: Any, args: Any, named: Any, result: Any) -> None:
    """Layer norm: over the last dims, with a weight and a bias of their shape."""
    dims = list(range(-len(args[1]), 0))
    _check_apart(owners, args[0], dims)
    owner = reduced(owners.of(args[0]), dims)
    scales = [owners.of(one) for one in args[2:4] if isinstance(one, Tensor)]
    normed, *others = tensors_of(result)
    owners.keep(normed, joined(owner, *scales), owners.ragged(args[0]))
    for one in others:
        owners.keep(one, owner, owners.ragged(args[0]))


def _gathered(owners: Owners, func: Any, args: Any, named: Any, result: Any) -> None:
    source, dim, index = args[:3]
    _check_apart(owners, source, [dim])
    if owners.ragged(source) - owners.ragged(index):
        raise NotRows("it picks from picked rows")
    picked = owners.of(source).gather(dim, index)
    owners.keep(result, joined(picked, owners.of(index)), owners.ragged(index))


def _read(owners: Owners, func: Any, args: Any, named: Any, result: Any) -> None:
    """``embedding`` and ``index_select`` read rows of their first tensor."""
    if func is aten.embedding.default:
        source, index, dim = args[0], args[1], 0
    else:
        source, dim, index = args
    dim %= source.dim()
    if owners.ragged(source):
        raise NotRows("it picks from picked rows")
    owner = owners.of(source)[(slice(None),) * dim + (index,)]
    asked = owners.of(index).view(*index.shape, *[1] * (source.dim() - dim - 1))
    ragged = frozenset(place + dim for place in owners.ragged(index))
    owners.keep(result, joined(owner, asked), ragged)


def _joins(owners: Owners, func: Any, args: Any, named: Any, result: Any) -> None:
    """``cat`` and ``stack``."""
    dim = (args[1] if len(args) > 1 else named.get("dim", 0)) % result.dim()
    grows = func._overloadpacket is aten.stack
    ragged: frozenset[int] = frozenset()
    for one in args[0]:
        if not grows:
            _check_apart(owners, one, [dim])
        ragged |= {place + (grows and place >= dim) for place in owners.ragged(one)}
    owners.keep(result, func([owners.of(one) for one in args[0]], dim), ragged)


def _nonzero(owners: Owners, func: Any, args: Any, named: Any) -> Tensor:
    """The places of a mask. Where its elements know several rows (experts that anybody chose), all
    places are given: see ``Answers``."""
    mask = args[0]
    owner = owners.of(mask)
    if bool((owner == MIXED).any()):
        owners.answers.note(line_of_model(), not bool(mask.all()))
        return torch.ones_like(mask, dtype=torch.bool).nonzero()
    if owners.ragged(mask):
        raise NotRows("it picks from picked rows")
    result = func(mask)
    if not owners.is_free(mask):
        owners.answers.note(line_of_model(), 0 < len(result) < mask.numel())
        owners.keep(result, owner[tuple(result.unbind(1))].unsqueeze(1), frozenset({0}))
    return result


def _places(owners: Owners, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return an index with masks written as places."""
    found: list[Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            found.append(index)
            continue
        places = _nonzero(owners, aten.nonzero.default, (index,), {})
        parts = places.unbind(1)
        owners.view(aten.unbind.int, (places, 1), {}, parts)
        found += parts
    return found


def _asked(owners: Owners, tensor: Tensor, places: Sequence[Tensor | None]) -> tuple[Tensor, Any]:
    """Return the owners of an index, as they meet what it reads, and its ragged dims there."""
    known = [index for index in places if index is not None]
    at = [dim for dim, index in enumerate(places) if index is not None]
    first = at[0] if at == list(range(at[0], at[0] + len(at))) else 0
    owner = joined(*map(owners.of, known))
    after = sum(dim not in at for dim in range(tensor.dim())) - first
    ragged = _aligned(owners, known, owner.dim())
    placed = frozenset(dim + first for dim in ragged)
    return owner.view(*owner.shape, *[1] * after), placed


def _index(owners: Owners, func: Any, args: Any, named: Any) -> Tensor:
    source, indices = args
    if owners.ragged(source):
        raise NotRows("it picks from picked rows")
    places = _places(owners, indices)
    result = aten.index.Tensor(source, places)
    asked, ragged = _asked(owners, source, places)
    owners.keep(result, joined(owners.of(source)[_as_index(places)], asked), ragged)
    return result


def _as_index(places: Sequence[Tensor | None]) -> tuple[Any, ...]:
    return tuple(slice(None) if index is None else index for index in places)


def _index_put(owners: Owners, func: Any, args: Any, named: Any) -> Tensor:
    target, indices, values, *rest = args
    if owners.ragged(target):
        raise NotRows("it writes among picked rows")
    places = _places(owners, indices)
    asked, _ = _asked(owners, target, places)
    owner = joined(owners.of(values), asked)
    landing = torch.arange(target.numel()).view(target.shape)[_as_index(places)]
    return _lands(owners, func(target, places, values, *rest), target, landing, owner)


def _scatter(owners: Owners, func: Any, args: Any, named: Any) -> Tensor:
    """``index_add``, ``index_copy``, ``scatter`` and ``scatter_add``."""
    target, dim, index, source = args[:4]
    if owners.ragged(target):
        raise NotRows("it writes among picked rows")
    numbers = torch.arange(target.numel()).view(target.shape)
    given = owners.of(source) if isinstance(source, Tensor) else torch.tensor(FREE)
    if func._overloadpacket in _BY_ROWS:
        landing = numbers.index_select(dim, index)
        shape = [1] * target.dim()
        shape[dim] = -1
        owner = joined(given, owners.of(index).view(shape))
    else:
        landing = numbers.gather(dim, index)
        if isinstance(source, Tensor):
            given = given[tuple(slice(0, size) for size in index.shape)]
        owner = joined(given, owners.of(index))
    return _lands(owners, func(*args, **named), target, landing, owner)


def _lands(
    owners: Owners, result: Tensor, target: Tensor, landing: Tensor, owner: Tensor
) -> Tensor:
    """Let what is written to places (numbers of elements of ``target``) be of its owners, too."""
    spread = owner.expand(landing.shape).reshape(-1)
    flat = landing.reshape(-1)
    top = torch.full((target.numel(),), FREE).scatter_reduce(0, flat, spread, "amax")
    low = torch.full((target.numel(),), MIXED).scatter_reduce(
        0, flat, torch.where(spread == FREE, MIXED, spread), "amin"
    )
    written = torch.where((top == FREE) | (low == top), top, MIXED).view(target.shape)
    after = joined(owners.of(target), written)
    if result is target:
        owners.of(target).copy_(after)
    else:
        owners.keep(result, after)
    return result


def _mixed(owners: Owners, func: Any, args: Any, named: Any, result: Any) -> None:
    """What is not known may make every element from all."""
    for one in tensors_of(result):
        owners.keep(one, torch.tensor(MIXED))


def _rule(func: Any, written: Sequence[Tensor]) -> Callable[..., None]:
    """Return the rule of an operator that picks nothing and is no view."""
    if func._overloadpacket in RULES:
        return RULES[func._overloadpacket]
    if torch.Tag.pointwise in func.tags:
        return _pointwise
    if written:
        raise NotRows(f"{func} writes")
    return _mixed


_BY_ROWS = (aten.index_add, aten.index_add_, aten.index_copy, aten.index_copy_)
_PICKS: dict[Any, Callable[..., Tensor]] = {
    aten.nonzero: _nonzero, aten.index: _index,
    **dict.fromkeys((aten.index_put, aten.index_put_), _index_put),
    **dict.fromkeys((*_BY_ROWS, aten.scatter, aten.scatter_, aten.scatter_add, aten.scatter_add_), _scatter),
}  # fmt: skip
RULES: dict[Any, Callable[..., None]] = {
    **dict.fromkeys((aten.copy_, aten._to_copy, aten.lift_fresh, aten.masked_fill_), _pointwise),
    **dict.fromkeys((aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like, aten.new_zeros,
                     aten.new_ones, aten.new_full, aten.new_empty, aten.zero_, aten.fill_), _made),
    **dict.fromkeys((aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.linear), _product),
    **dict.fromkeys((aten.sum, aten.mean, aten.amax, aten.amin, aten.any, aten.all, aten.argmax,
                     aten.argmin, aten.prod, aten.logsumexp, aten.var), _reduction),
    **dict.fromkeys((aten._softmax, aten._log_softmax, aten.topk, aten.sort, aten.cumsum), _along),
    aten.native_layer_norm: _norm, aten.gather: _gathered,
    aten.embedding: _read, aten.index_select: _read, aten.cat: _joins, aten.stack: _joins,
}  # fmt: skip
