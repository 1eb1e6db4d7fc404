"""Operators that slide a window over an image: how far a piece of it reaches into its neighbours.

With kernel k, stride s, padding p and dilation d, output row o reads the input rows o s - p ... o s - p
+ (k - 1) d. Where the input has just s times as many rows as the output, equal pieces of both belong
together, and every piece reads p rows of the one before and (k - 1) d + 1 - s - p of the one after.
Otherwise (convolutions without padding, mostly) pieces would drift apart, and the dim stays whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardwright.operators.splitting.iteration import Iteration, Window
from shardwright.operators.splitting.rules.signature import Names, Rule, Signature, space

SPACE = ("d", "h", "w")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slide:
    """A window's numbers along one dim, and the dim's sizes before and after."""

    kernel: int
    stride: int
    padding: int
    dilation: int
    size: int
    result: int

    @property
    def after(self) -> int:
        """How far a piece reads beyond its end; negative where it does not read all of itself."""
        return (self.kernel - 1) * self.dilation + 1 - self.stride - self.padding

    def ends_within(self, is_maximum: bool) -> bool:
        """Whether windows do not reach beyond the padding, which an average does not count."""
        return 0 <= self.after <= (self.size if is_maximum else self.padding)

    @property
    def splits(self) -> bool:
        """Whether equal pieces of input and output belong together."""
        extent = (self.kernel - 1) * self.dilation + 1
        return self.size == self.stride * self.result and self.padding < extent


def _slides(call: Signature, kernel: Sequence[int], rank: int) -> list[_Slide]:
    def each(name: str, default: Sequence[int]) -> Sequence[int]:
        values = call.integers(name) or default
        return values if len(values) == rank else tuple(values) * rank

    unit = (1,) * rank
    kernel = kernel if len(kernel) == rank else tuple(kernel) * rank
    default = unit if call.position("weight") >= 0 else kernel
    columns = (
        kernel,
        each("stride", default),
        each("padding", (0,) * rank),
        each("dilation", unit),
        call.inputs[0][-rank:],
        call.outputs[0][-rank:],
    )
    return [
        _Slide(kernel=k, stride=s, padding=p, dilation=d, size=size, result=result)
        for k, s, p, d, size, result in zip(*columns, strict=True)
    ]


def convolved(call: Signature, rank: int) -> tuple[Names, tuple[Window, ...]]:
    """Return the names of a convolution's ``rank`` dims of space, "" where one must stay whole."""
    if isinstance(call.attribute("padding"), str) or call.are_parameters[0]:
        return ("",) * rank, ()
    return _named(_slides(call, call.inputs[1][-rank:], rank), 0.0)


def _named(slides: Sequence[_Slide], fill: float) -> tuple[Names, tuple[Window, ...]]:
    names = SPACE[-len(slides) :]
    known = tuple(name if slide.splits else "" for name, slide in zip(names, slides, strict=True))
    windows = tuple(
        Window(dim=name, before=slide.padding, after=max(slide.after, 0), fill=fill)
        for name, slide in zip(names, slides, strict=True)
        if slide.splits and (slide.padding > 0 or slide.after > 0)
    )
    return known, windows


def with_windows(iteration: Iteration, call: Signature, windows: Sequence[Window]) -> Iteration:
    """Add windows, and that no piece may be smaller than what its neighbours need of it."""
    names = iteration.inputs[0]
    kept = tuple(window for window in windows if window.dim in names)
    most = {
        window.dim: call.inputs[0][names.index(window.dim)] // max(window.before, window.after)
        for window in kept
    }
    dims = tuple(replace(dim, most=most.get(dim.name, 0)) for dim in iteration.dims)
    return replace(iteration, dims=dims, windows=kept)


def pooling(rank: int, *, is_maximum: bool) -> Rule:
    """Split samples, channels and, with halos, space."""

    def rule(call: Signature) -> Iteration:
        free = ("n", "c") if len(call.inputs[0]) == rank + 2 else ("c",)
        slides = _slides(call, call.integers("kernel_size"), rank)
        names, windows = _named(slides, -math.inf if is_maximum else 0.0)
        if len(call.outputs) > 1 or call.are_parameters[0]:  # indices are those of the whole image
            names, windows = ("",) * rank, ()
        if call.attribute("ceil_mode") is True:
            pairs = zip(names, slides, strict=True)
            names = tuple(name if slide.ends_within(is_maximum) else "" for name, slide in pairs)
        every = free + names
        iteration = space(call, [every], [every] * len(call.outputs))
        return with_windows(iteration, call, windows)

    return rule


def mean_over_space(rank: int) -> Rule:
    """Split samples and channels; space too where one number is left of it."""

    def rule(call: Signature) -> Iteration:
        free = ("n", "c") if len(call.inputs[0]) == rank + 2 else ("c",)
        shapes = zip(SPACE[-rank:], call.outputs[0][-rank:], strict=True)
        names = tuple(name if size == 1 else "" for name, size in shapes)
        return space(call, [free + names], [free + ("",) * rank], mean=names)

    return rule


def enlarged(rank: int) -> Rule:
    """Split samples and channels; space too where every row is repeated a whole number of times."""

    def rule(call: Signature) -> Iteration:
        free = ("n", "c") if len(call.inputs[0]) == rank + 2 else ("c",)
        factors = call.attribute("scale_factors")
        names = ("",) * rank
        if call.attribute("output_size") is None and isinstance(factors, tuple):
            sizes = zip(SPACE[-rank:], call.inputs[0][-rank:], call.outputs[0][-rank:], strict=True)
            names = tuple(
                name if factor == result // size and result % size == 0 else ""
                for factor, (name, size, result) in zip(factors, sizes, strict=True)
            )
        return space(call, [free + names], [free + names])

    return rule


def expanded(call: Signature, rank: int) -> Names:
    """Name the space of a transposed convolution whose windows lie side by side."""
    slides = _slides(call, call.inputs[1][-rank:], rank)
    extra = call.integers("output_padding") or (0,)
    return tuple(
        name
        if slide.kernel == slide.stride and not slide.padding and not any(extra)
        and slide.dilation == 1 else ""
        for name, slide in zip(SPACE[-rank:], slides, strict=True)
    )  # fmt: skip
