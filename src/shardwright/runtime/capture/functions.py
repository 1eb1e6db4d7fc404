"""Functions with a gradient of their own (``torch.autograd.Function``), as operators of the graph.

Export keeps their forward and loses their backward. Here each application becomes an operator that
calls the function. One whose forward and backward are seen to compute every element from those at
the same place is of kind ``pointwise.NAME`` and may be split, ``bent.NAME`` where backward is not linear
in the gradient it is given, as a clamp is not; ``rowwise.NAME`` where rows are seen to be computed each by
itself (``rowwise``) and backward is linear; another is opaque.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from shardwright.runtime.capture.applied import applied, run_function
from shardwright.runtime.capture.autocast import flat_regions
from shardwright.runtime.capture.counting import Work
from shardwright.runtime.capture.gradients import (
    check_engine_call,
    check_function,
    engine_calls,
    inference_without_gradients,
)
from shardwright.runtime.capture.hooks import Opaque, Stub, keep_stub, stub_keys
from shardwright.runtime.capture.lying import memory_of
from shardwright.runtime.capture.recomputing import no_checkpoints
from shardwright.runtime.capture.record import Slot, Unsupported, aten
from shardwright.runtime.capture.rowwise import (
    MOST_ELEMENTS,
    Change,
    Given,
    adds_up,
    is_linear,
    rows_of,
)
from shardwright.runtime.engine import run_backward

Function: Any = torch.autograd.Function

# Functions whose written backward is the derivative of their forward, which autograd finds as well.
PLAIN_FUNCTIONS = frozenset({
    "transformers.models.bloom.modeling_bloom.GeLUFunction",
    # How torch looks up an element by a number that ``vmap`` counts: masks of images among text do.
    "torch._dynamo._trace_wrapped_higher_order_op.ModIndex",
})  # fmt: skip
# What besides tensors an operator may be given: not a module, whose parameters would go unseen.
FEW = 4  # rows of a function that is tried
PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


class Applied(nn.Module):
    """A function as a module without parameters."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function.apply(*args)


class _Run(nn.Module):
    """The same while functions are traced."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return run_function(self.function, *args)


class _Context:
    """Stands for a function's context while the shapes of its results are asked for."""

    def __init__(self, args: Sequence[Any]) -> None:
        self.needs_input_grad = tuple(isinstance(one, Tensor) for one in args)
        self.undifferentiable: tuple[Any, ...] = ()
        self.saved: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved = tensors

    def save_for_forward(self, *_: Any) -> None:
        """Keep nothing: there is no forward mode."""

    @property
    def kept(self) -> list[Tensor]:
        """What backward is to find, in whichever way it was left."""
        return [one for one in (*self.saved, *vars(self).values()) if isinstance(one, Tensor)]

    def set_materialize_grads(self, _: bool) -> None:
        """Change nothing: there is no backward."""

    def mark_non_differentiable(self, *results: Any) -> None:
        self.undifferentiable = results

    def mark_dirty(self, *_: Any) -> None:
        raise Unsupported("a custom gradient of a function that writes its arguments")


def _forward(function: Any) -> Callable[..., Any]:
    """Return what a function computes, without a context."""
    if function.setup_context is not Function.setup_context:  # written apart
        return function.forward  # type: ignore[no-any-return]
    return lambda *args, **kwargs: function.forward(_Context(args), *args, **kwargs)


@contextlib.contextmanager
def custom_gradients() -> Iterator[None]:
    """Keep custom gradients whole while tracing, and refuse what export would lose without a word:
    gradients taken inside forward, of which it keeps the values only, and hooks.

    ``torch.utils.checkpoint`` is passed over: a plan says itself what is recomputed.
    """
    original = Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        # The wrapper torch itself puts around a custom operator: export keeps it whole.
        if cls.__name__.startswith("GeneratedBackwardFor_"):
            return original.__func__(cls, *args, **kwargs)
        if f"{cls.__module__}.{cls.__qualname__}" in PLAIN_FUNCTIONS:
            return _forward(cls)(*args, **kwargs)
        check_function(cls, args)
        if kwargs:
            raise Unsupported(f"the custom gradient of {cls.__name__}")
        key, tensors, spec = _stub(cls, args)
        keys.append(key)
        return pytree.tree_unflatten(torch.ops.shardwright.opaque(tensors, key), spec)

    def refuse_engine(_: Any, *args: Any, **options: Any) -> Any:
        check_engine_call(args, options)
        raise Unsupported("a gradient taken inside forward (torch.autograd.grad)")

    def refuse_hook(*_: Any, **__: Any) -> Any:
        raise Unsupported("a hook on a gradient (Tensor.register_hook in forward)")

    def beneath(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls.__name__.startswith("GeneratedBackwardFor_"):
            return run_function(cls, *args, **kwargs)
        return apply(cls, *args, **kwargs)

    hook = torch.Tensor.register_hook
    Function.apply = classmethod(apply)
    torch.Tensor.register_hook = refuse_hook  # type: ignore[method-assign]
    try:
        with (
            stub_keys() as keys, engine_calls(refuse_engine), traced_data(), flat_regions(),
            inference_without_gradients(), no_checkpoints(), applied(beneath),
        ):  # fmt: skip
            yield
    finally:
        Function.apply = original
        torch.Tensor.register_hook = hook  # type: ignore[method-assign]


@contextlib.contextmanager
def traced_data() -> Iterator[None]:
    """Let ``tensor.data`` of a traced tensor be a view of it, and a new one be written into it.

    Export would make a constant of it: what is read would never change, what is written be lost.
    """
    plain: Any = torch._C.TensorBase.data

    def read(tensor: Tensor) -> Tensor:
        is_traced = isinstance(tensor, (FakeTensor, FunctionalTensor))
        return tensor.detach() if is_traced else plain.__get__(tensor)

    def write(tensor: Tensor, value: Tensor) -> None:
        if not isinstance(tensor, (FakeTensor, FunctionalTensor)):
            plain.__set__(tensor, value)
        elif (tensor.shape, tensor.dtype) != (value.shape, value.dtype):
            raise Unsupported("a tensor whose data are given another shape or dtype")
        else:
            with torch.no_grad():
                tensor.detach().copy_(value)

    torch.Tensor.data = property(read, write)  # type: ignore[assignment]
    try:
        yield
    finally:
        del torch.Tensor.data


def _stub(cls: Any, args: tuple[Any, ...]) -> tuple[str, list[Tensor], Any]:
    """Return the key of a function's stub, the tensors it is given, and how its results are nested."""
    leaves, given = pytree.tree_flatten(args)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    strange = [leaf for leaf in leaves if not isinstance(leaf, (Tensor, *PLAIN))]
    if strange or not tensors:
        raise Unsupported(f"the custom gradient of {cls.__name__}")
    with _disable_current_modes(), torch.no_grad():
        metas = [torch.empty(t.shape, dtype=t.dtype, device="meta") for t in tensors]
        places = iter(metas)
        asked = [next(places) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        asked_args = pytree.tree_unflatten(asked, given)
        context = _Context(asked_args)
        has_setup = cls.setup_context is not Function.setup_context
        made = cls.forward(*asked_args) if has_setup else cls.forward(context, *asked_args)
        if has_setup:
            cls.setup_context(context, asked_args, made)
        results, spec = pytree.tree_flatten(made)
        if not results or not all(isinstance(one, Tensor) for one in results):
            raise Unsupported(f"the custom gradient of {cls.__name__}")
        sort, rows = _sort_of(cls, leaves, given)
        saves, made_inside = _saved(context.kept, [*metas, *results])
    numbers = itertools.count()
    slots = [Slot(next(numbers)) if isinstance(one, Tensor) else one for one in leaves]
    whole = f"the custom gradient of {cls.__name__} is one opaque operator"
    notes = {
        "opaque": f"{whole} and runs replicated",
        "rowwise": f"{whole}, split over rows only: it was seen to compute each by itself, in pieces as whole",
    }
    call = Opaque(
        kind=f"{sort}.{cls.__name__}",
        path=None,
        module=Applied(cls),
        state=(),
        arguments=(pytree.tree_unflatten(slots, given), {}),
        note=notes.get(sort, ""),
        saves=saves,
        by_row=rows,
        work=Work(kept=made_inside),
    )
    ids = {id(one) for one in context.undifferentiable}
    fixed = frozenset(place for place, one in enumerate(results) if id(one) in ids)

    def like(given: list[Tensor]) -> list[Tensor]:
        return [torch.empty(one.shape, dtype=one.dtype, device=given[0].device) for one in results]

    return keep_stub(Stub(call, like, fixed)), tensors, spec


def _saved(kept: Sequence[Tensor], known: Sequence[Tensor]) -> tuple[tuple[int, ...], int]:
    """Return which known tensors are kept, views of them among them, and the bytes of what else is."""
    places: dict[Any, int] = {}
    for place, one in enumerate(known):
        places.setdefault(memory_of(one), place)
    storages = {memory_of(one): one.untyped_storage().nbytes() for one in kept}
    others = sum(count for storage, count in storages.items() if storage not in places)
    return tuple(sorted(places[one] for one in storages if one in places)), others


# -- which functions are pointwise, and which of these bend gradients -----------------------------------

# Operators without torch's tag that move nothing, where they keep the shape.
_IN_PLACE = frozenset(
    {
        aten.detach.default, aten.clone.default, aten.alias.default, aten._to_copy.default,
        aten.ones_like.default, aten.zeros_like.default, aten.full_like.default,
        aten.copy_.default, aten.lift_fresh.default, aten.fill_.Scalar, aten.zero_.default,
    }
)  # fmt: skip


class _Moves(Exception):
    """An operator of a function computes an element from another place."""


class _Elements(TorchDispatchMode):
    """Notes operators with their numbers while all of them are pointwise."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        result = func(*args, **given)
        leaves = pytree.tree_leaves((args, given))
        shapes = [leaf.shape for leaf in leaves if isinstance(leaf, Tensor)]
        is_same = isinstance(result, Tensor) and shapes and result.shape == shapes[0]
        is_pointwise = torch.Tag.pointwise in func.tags and isinstance(result, Tensor)
        is_view = func in (aten.view.default, aten.expand.default) and is_same
        if is_view:
            return result
        if not (is_pointwise or (func in _IN_PLACE and is_same) or _fills(func, args)):
            raise _Moves
        self.noted.append((func, [one for one in leaves if isinstance(one, (int, float))]))
        return result


def _fills(func: Any, args: Any) -> bool:
    """Whether ``x[mask] = number`` is written, with a mask as large as ``x``."""
    if func is not aten.index_put_.default or len(args) != 3 or len(args[1]) != 1:
        return False
    mask = args[1][0]
    return mask.dtype == torch.bool and mask.shape == args[0].shape and args[2].numel() == 1


def _sort_of(cls: Any, leaves: Sequence[Any], given: Any) -> tuple[str, tuple[int, ...]]:
    """Return the first word of its operator's kind, and which tensors' rows are computed each by itself."""
    if _is_pointwise(cls, leaves, given):
        return ("pointwise" if _is_linear(cls, leaves, given) else "bent"), ()
    if not _are_few(leaves):
        return "opaque", ()
    for high in (2, 1):  # numbers that are places of what is only one stay 0
        with contextlib.suppress(Exception):  # whatever it wants of its arguments
            drawn = _drawn(cls, leaves, given, high)
            rows = rows_of(drawn)
            if rows and is_linear(drawn.wide()):
                return "rowwise", rows
    return "opaque", ()


def _are_few(leaves: Sequence[Any]) -> bool:
    """Whether a few rows of what a function is given are few enough numbers to try it with."""
    shapes = [leaf.shape for leaf in leaves if isinstance(leaf, Tensor)]
    rows = shapes[0][:1]
    each = (shape[1:] if shape[:1] == rows else shape for shape in shapes)
    return FEW * sum(map(math.prod, each)) <= MOST_ELEMENTS


def _drawn(cls: Any, leaves: Sequence[Any], given: Any, high: int) -> Given:
    """Return a call of a function with a few rows, integers below ``high``."""
    numbers = torch.Generator().manual_seed(0)
    before = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    count = before[0].shape[:1]
    tensors: list[Tensor] = []
    for one in before:
        few = list(one.shape)
        if one.shape[:1] == count:
            few[:1] = [min(FEW, size) for size in count]
        draw = torch.randn if one.is_floating_point() else partial(torch.randint, high)
        tensors.append(draw(few, generator=numbers).to(one.dtype))
    places = iter(tensors)
    filled = [next(places) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    every, spec = pytree.tree_flatten((tuple(pytree.tree_unflatten(filled, given)), {}))
    return Given(_Run(cls), {}, tuple(tensors), tuple(every), spec)


def _is_pointwise(cls: Any, leaves: Sequence[Any], given: Any) -> bool:
    """Whether forward and backward are pointwise, tried on small tensors of two shapes.

    What is the same for both shapes does not know them, so that a shard may be any part.
    """
    try:
        small, large = (_operators_of(cls, leaves, given, sizes) for sizes in ((2, 3), (4, 5)))
    except Exception:  # noqa: BLE001 - whatever it wants of its arguments, it is not sure to be so
        return False
    return small == large


def _is_linear(cls: Any, leaves: Sequence[Any], given: Any) -> bool:
    """Whether backward is linear: in float64 where it runs in that, since in what rounds to fewer digits a clamp may
    look like rounding."""

    def back(change: Change, dtype: torch.dtype | None) -> Sequence[Tensor | None]:
        small = _small(leaves, (2, 3), dtype)
        return _differentiated(cls, small, given, lambda one: change(one).to(one))[1]

    with contextlib.suppress(Exception):  # whatever it wants of its arguments
        return adds_up(partial(back, dtype=torch.float64))
    return adds_up(partial(back, dtype=None))


def _operators_of(cls: Any, leaves: Sequence[Any], given: Any, sizes: tuple[int, int]) -> list[Any]:
    made = _small(leaves, sizes)
    whole = torch.broadcast_shapes(*(one.shape for one in made if isinstance(one, Tensor)))
    with _Elements() as elements:
        results, found = _differentiated(cls, made, given, lambda one: torch.full_like(one, 0.5))
    # A gradient of what was broadcast would be a sum over places.
    if any(one is not None and one.shape != whole for one in (*results, *found)):
        raise _Moves
    return [sum(one.requires_grad for one in results), *elements.noted]


def _differentiated(
    cls: Any, made: Sequence[Any], given: Any, gradient: Callable[[Tensor], Tensor]
) -> tuple[list[Tensor], Sequence[Tensor | None]]:
    """Return a function's results, and the gradients of what it was given where those are ``gradient``."""
    with torch.enable_grad():
        # Both by what this module has not put something else in the place of.
        results: list[Tensor] = pytree.tree_leaves(
            run_function(cls, *pytree.tree_unflatten(list(made), given))
        )
        asked = [one for one in results if one.requires_grad]
        wanted = [one for one in made if isinstance(one, Tensor) and one.requires_grad]
        edges = [get_gradient_edge(one) for one in asked]
        return results, run_backward(edges, [gradient(one) for one in asked], wanted)


def _small(
    leaves: Sequence[Any], sizes: tuple[int, int], dtype: torch.dtype | None = None
) -> list[Any]:
    """Return small tensors for the places of tensors, floating ones in a dtype where one is given."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    full = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    made: list[Any] = []
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            made.append(leaf)
            continue
        skipped = len(full) - leaf.dim()
        shape = [1 if n == 1 else sizes[(at + skipped) % 2] for at, n in enumerate(leaf.shape)]
        tensor = torch.linspace(-1.5, 1.5, max(1, torch.Size(shape).numel())).reshape(shape)
        is_floating = leaf.is_floating_point()
        own = (dtype or leaf.dtype) if is_floating else leaf.dtype
        made.append(tensor.to(own).requires_grad_(is_floating))
    return made
