"""Sizes that a batch says in numbers (the grid of each image), known while a model is traced.

A tower of images counts its patches by a tensor of the batch: how many rows belong to which image, in which order
windows lie. A trace of values unknown ends there. Where every sample says the same small numbers, they are those
of how the images were made, and the next batch has them too: such an entry is traced with its values. Beside each
tensor that is made of it and of constants alone lies another with values, which answers what Python asks. What so
is known is no operator of the graph. A batch with other numbers is refused before it is cut (``inputs``).

Rows that a model picks by a mask that is not known, and not made of words (``pixels[is_image]``), are taken to be all of
them: the mask is known from then on. Whether that is so of the batch, and may be asked of others, is seen in the graph (``filled``).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._export import non_strict_utils
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch

from shardwright.runtime.capture.counting import tensors_of, written_by
from shardwright.runtime.capture.lying import memory_of
from shardwright.runtime.capture.record import aten


@contextlib.contextmanager
def known_sizes() -> Iterator[None]:
    """Let exporting know what is made of known entries."""
    before = non_strict_utils.FakeTensorMode
    non_strict_utils.FakeTensorMode = KnowingMode  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        non_strict_utils.FakeTensorMode = before  # type: ignore[misc]


# Of a tensor with more numbers none is known: sizes are made of few, and what is known takes memory.
MOST_KNOWN = 2**24
_ASKING = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


def says_sizes(tensor: Any) -> bool:
    """Whether a batch entry says the same sizes of every sample: whole numbers in rows of two to four (height and width,
    time before them, or a number of tiles), none of them 0, all rows alike. Longer rows are a sample's own words or marks, single numbers its label."""
    if not isinstance(tensor, Tensor) or tensor.is_meta or isinstance(tensor, FakeTensor):
        return False
    if tensor.dtype not in (torch.int32, torch.int64) or tensor.dim() != 2 or not tensor.numel():
        return False
    return 2 <= tensor.shape[1] <= 4 and bool((tensor == tensor[0]).all() and (tensor > 0).all())


def asks(func: Any, result: Any = None) -> bool:
    """Whether an operator asks for values: what it returns, or the shape of it, depends on them."""
    if not isinstance(func, torch._ops.OpOverload):
        return False
    is_told = not isinstance(result, Tensor | tuple | list | None)
    return (
        is_told
        or func.name().startswith("aten::unique")
        or any(tag in func.tags for tag in _ASKING)
    )


def is_repeatable(func: Any) -> bool:
    """Whether what is called is an operator of ATen that makes the same of the same."""
    return (
        isinstance(func, torch._ops.OpOverload)
        and func.namespace == "aten"
        and torch.Tag.nondeterministic_seeded not in func.tags
    )


def mask_of(func: Any, args: Sequence[Any]) -> Any:
    """Return what a call picks rows by, ``x[mask]``; None of another, or of what is no mask."""
    if func is not aten.index.Tensor:
        return None
    mask, *others = args[1]
    return mask if mask is not None and all(one is None for one in others) else None


def all_rows(source: Tensor, mask: Tensor) -> list[int]:
    """Return the shape of the rows that a mask picks where it picks all."""
    return [math.prod(mask.shape), *source.shape[mask.dim() :]]


def known_of(tensor: Tensor) -> Tensor | None:
    """Return the values beside a tensor of a trace, None where they are not known."""
    return getattr(tensor, "known", None)


class Shadows:
    """Tensors with values beside those of a trace. A value that was written with something unknown is lost, and with
    it all that look at its memory."""

    def __init__(self) -> None:
        self._lost: dict[int, Any] = {}

    def of(self, args: Any, follows: bool = False) -> Any:
        """Return arguments with values in place of tensors, None where one of them is not known. ``follows``: what is
        made of masks that were not known yet is looked for, too."""
        leaves, spec = pytree.tree_flatten(args)
        if any(isinstance(one, torch.SymInt | torch.SymFloat | torch.SymBool) for one in leaves):
            return None
        found = [self._value(one, follows) if isinstance(one, Tensor) else one for one in leaves]
        if any(
            one is None and isinstance(old, Tensor) for one, old in zip(found, leaves, strict=True)
        ):
            return None
        return pytree.tree_unflatten(found, spec)

    def _value(self, tensor: Tensor, follows: bool) -> Tensor | None:
        if isinstance(tensor, FakeTensor):
            value = known_of(tensor)
            if value is None and follows:
                value = self._followed(tensor)
        else:
            value = tensor if type(tensor) is Tensor and tensor.device.type == "cpu" else None
        return None if value is None or memory_of(value) in self._lost else value

    def _followed(self, tensor: Tensor) -> Tensor | None:
        """Return what a tensor was made as, of masks that are known by now and were not written since."""
        made = getattr(tensor, "made", None)
        if made is None or any(one._version != version for one, version in made.versions):
            return None
        values = self.of(made.given, follows=True)
        if values is None:
            return None
        with no_dispatch():
            found = tensors_of(made.func(*values[0], **values[1]))
        tensor.known = found[made.place]  # type: ignore[attr-defined]
        return found[made.place]

    def lose(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Forget what a call writes with something that is not known."""
        for one in written_by(func, args, kwargs):
            value = known_of(one)
            if value is not None:
                self._lost[memory_of(value)] = value.untyped_storage()


class _Made:
    """How a tensor was made of masks, or of what is made of them."""

    def __init__(self, func: Any, given: Any, place: int) -> None:
        self.func, self.given, self.place = func, given, place
        self.versions = [(one, one._version) for one in tensors_of(given)]


class KnowingMode(FakeTensorMode):
    """Runs without values, but for what is made of known entries and constants alone."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.shadows = Shadows()

    def from_tensor(self, tensor: Tensor, **kwargs: Any) -> FakeTensor:  # type: ignore[override]
        """Return a tensor without storage like another, of known values if those are."""
        made: Any = super().from_tensor(tensor, **kwargs)
        value = known_of(tensor)
        if value is not None:
            with no_dispatch():
                made.known = value.clone()
        elif not tensor.is_floating_point():
            made.says_words = True
        return made  # type: ignore[no-any-return]

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator; with values, too, where these are known."""
        given = (list(args), dict(kwargs or {}))
        values = self.shadows.of(given, asks(func)) if is_repeatable(func) else None
        if values is not None and asks(func):
            return self._known(func, values)
        mask = mask_of(func, given[0])
        if isinstance(mask, FakeTensor) and mask.dtype == torch.bool and self._passes(mask):
            shape = all_rows(given[0][0], mask)
            return super().dispatch(aten.new_empty.default, types, [given[0][0], shape], {})
        result = super().dispatch(func, types, *given)
        if values is not None:
            self._beside(func, values, result)
        elif isinstance(func, torch._ops.OpOverload):
            self.shadows.lose(func, *given)
            _remember(func, given, result)
            _pass_on_words(given, result)
        return result

    def _passes(self, mask: Any) -> bool:
        """Whether a mask lets all rows through, as one does that is not known and does not depend on words."""
        if mask.numel() > MOST_KNOWN or hasattr(mask, "says_words"):
            return False
        known = self.shadows.of(mask, follows=True)
        with no_dispatch():
            if known is None and known_of(mask) is None:
                mask.known = known = torch.ones(mask.shape, dtype=torch.bool)
            return known is not None and bool(known.all())

    def _known(self, func: Any, values: Any) -> Any:
        """Return what a call answers or makes of values, in a number or shape that only values tell."""
        with no_dispatch():
            answer = func(*values[0], **values[1])
        return pytree.tree_map_only(Tensor, self.known, answer)

    def _beside(self, func: Any, values: Any, result: Any) -> None:
        """Compute a call's results with values, too."""
        made = [one for one in pytree.tree_leaves(result) if isinstance(one, FakeTensor)]
        if not made or any(one.device.type != "cpu" or one.numel() > MOST_KNOWN for one in made):
            return
        with no_dispatch():
            found = pytree.tree_leaves(func(*values[0], **values[1]))
        for one, value in zip(made, (one for one in found if isinstance(one, Tensor)), strict=True):
            one.known = value  # type: ignore[attr-defined]

    def known(self, value: Tensor) -> FakeTensor:
        """Return a tensor of this mode whose values are known."""
        meta = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        made = FakeTensor(self, meta, torch.device("cpu"))
        made.known = value  # type: ignore[attr-defined]
        return made


def _remember(func: Any, given: Any, result: Any) -> None:
    """Note how what is made of masks was made: their values may be known when it is asked for its own."""
    if not is_repeatable(func) or func._schema.is_mutable:
        return
    sources = tensors_of(given)
    if not sources or not all(map(_may_be_known, sources)):
        return
    for place, one in enumerate(tensors_of(result)):
        if isinstance(one, FakeTensor) and one.numel() <= MOST_KNOWN:
            one.made = _Made(func, given, place)  # type: ignore[attr-defined]


def _pass_on_words(given: Any, result: Any) -> None:
    """Note of what is made of whole numbers that are not known, words and marks, that it is."""
    if any(hasattr(one, "says_words") for one in tensors_of(given)):
        for one in tensors_of(result):
            one.says_words = True  # type: ignore[attr-defined]


def _may_be_known(tensor: Tensor) -> bool:
    """Whether a tensor is a mask, made of masks, or known."""
    is_known = known_of(tensor) is not None or not isinstance(tensor, FakeTensor)
    return is_known or tensor.dtype == torch.bool or hasattr(tensor, "made")
