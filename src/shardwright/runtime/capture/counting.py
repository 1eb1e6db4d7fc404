"""Modes that watch the operators of a run: flops, the stream of operators, and picks by value."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor as is_wrapped
from torch._ops import HigherOrderOperator
from torch._prims_common import dtype_to_type
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten
_WHETHER = {aten.is_nonzero.default}
_ASKS = {aten._local_scalar_dense.default, aten.item.default, *_WHETHER}
_PICKS = {aten.nonzero.default, aten._local_scalar_dense.default, aten.masked_select.default}


class Work(NamedTuple):
    """What a call takes: flops, and bytes of what it makes inside that backward needs."""

    flops: float = 0.0
    kept: int = 0


NOTHING = Work()


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors in nested arguments, in order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def is_pick(func: Any, args: Sequence[Any]) -> bool:
    """Whether an operator's result depends on values in a way that no graph can hold."""
    if func is aten.index.Tensor or func is aten.index_put_.default:
        return any(isinstance(one, Tensor) and one.dtype == torch.bool for one in args[1])
    return func in _PICKS


def written_by(func: Any, args: Any, named: Any) -> list[Tensor]:
    """Return the tensors that an operator writes."""
    found: list[Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else named.get(argument.name)
            found += tensors_of(value)
    return found


class Flops(TorchDispatchMode):
    """Counts the flops of products as they run, and says where elements are picked by values, which
    dtypes results have, which memories are ``written`` and ``used``, by which operator last, and how much of what is made lives on.
    What has functions among its arguments, such as ``torch.cond``, picks by values."""

    supports_higher_order_operators = True

    def __init__(self, picks: Callable[[], None], makes: Callable[[torch.dtype], None]) -> None:
        super().__init__()
        self.total = 0.0
        self.made: dict[StorageWeakRef, int] = {}
        self.count = 0
        self.used: dict[int, int] = {}
        self.written: dict[int, torch.UntypedStorage] = {}
        self.picks, self.makes = picks, makes
        self._is_aside = False

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Let what whoever watches does itself not count as a use."""
        self._is_aside = True
        try:
            yield
        finally:
            self._is_aside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        there = {memory._cdata for memory in memories_of((args, given))}
        self.count += 1
        if not self._is_aside:
            self.used |= dict.fromkeys(there, self.count)
        result = func(*args, **given)
        if isinstance(func, HigherOrderOperator):
            self.picks()
            return result
        if is_pick(func, args):
            self.picks()
        if isinstance(result, Tensor):
            self.makes(result.dtype)
        self._note(result, there, written_by(func, args, given) if func._schema.is_mutable else ())
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.total += count(*args, **given, out_val=result)
        return result

    def _note(self, result: Any, there: set[int], written: Sequence[Tensor]) -> None:
        new = (memory for memory in memories_of(result) if memory._cdata not in there)
        self.made |= {StorageWeakRef(memory): memory.nbytes() for memory in new}
        memories = (tensor.untyped_storage() for tensor in written)
        self.written |= {one._cdata: one for one in memories}

    def since(self, begun: tuple[float, int], result: Any) -> Work:
        """Return the work since a ``now``: what lives on is kept, but for the results."""
        total, count = begun
        made = itertools.islice(self.made.items(), count, None)
        alive = sum(size for memory, size in made if not memory.expired())
        out = {memory._cdata: memory.nbytes() for memory in memories_of(result)}
        return Work(self.total - total, max(0, alive - sum(out.values())))

    @property
    def now(self) -> tuple[float, int]:
        """How much there has been so far."""
        return self.total, len(self.made)


def memories_of(tree: Any) -> Iterator[torch.UntypedStorage]:
    """Yield the memory of every dense tensor in nested results that has any."""
    for tensor in tensors_of(tree):
        if tensor.layout == torch.strided and not tensor.is_meta and not is_wrapped(tensor):
            yield tensor.untyped_storage()


class Answering(TorchDispatchMode):
    """Takes for nothing (0, False) what a run without values asks of them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ASKS:
            return dtype_to_type(torch.bool if func in _WHETHER else args[0].dtype)(0)
        return func(*args, **(kwargs or {}))


class Stream(TorchDispatchMode):
    """Notes the operators of a run and the shapes of what they make."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "namespace", "") == "prim":  # asks for a device; answers are remembered
            return result
        shapes = [tuple(tensor.shape) for tensor in tensors_of(result)]
        numbers = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, _NUMBERS)]
        self.noted.append((str(func), numbers, shapes))
        return result


_NUMBERS = (bool, int, float)
