"""The backward of a segment as actions: whole, or in two halves, I and W."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from shardwright.core.program import Kind, Segment
from shardwright.runtime.deferral import Aside, Later
from shardwright.runtime.engine import run_backward
from shardwright.runtime.store import DTYPES, Store
from shardwright.runtime.waiting import Action

# Adds to the gradient of one of a segment's inputs.
Add = Callable[[Tensor], None]


def made_by(segment: Segment, store: Store, kind: Kind) -> list[int]:
    """Return, for every input of a segment, the value of the gradient that a backward of this kind makes,
    -1 where it makes none: I makes those of activations, W those of parameters."""
    values, other = store.program.values, {True: Kind.INPUT_GRADIENT, False: Kind.WEIGHT_GRADIENT}
    return [
        -1 if kind == other[values[value].role == "parameter"] else values[value].gradient
        for value in segment.inputs
    ]


def backward(
    kind: Kind, segment: Segment, store: Store, microbatch: int, kept: list[Any], aside: Aside
) -> Action:
    """Return the action of a whole backward or of a half.

    ``kept`` passes on, from forward to backward or I, the edges in and the leaves; from I to W what
    products put ``aside`` and the gradients of parameters that were found on the way.
    """
    adders = _adders(segment, store, microbatch)
    if kind == Kind.WEIGHT_GRADIENT:
        return _weights(kept, adders)
    values = store.program.values
    incoming = [
        store.slot(values[value].gradient, microbatch)
        for value in segment.outputs
        if values[value].gradient >= 0
    ]
    tracked = [place for place, value in enumerate(segment.inputs) if values[value].gradient >= 0]
    later = made_by(segment, store, Kind.WEIGHT_GRADIENT) if kind == Kind.INPUT_GRADIENT else []
    waiting = {place for place, gradient in enumerate(later) if gradient >= 0}
    data = store.data

    def run() -> None:
        edges, leaves = kept
        kept.clear()
        gradients = [data[slot] for slot in incoming]
        live = [
            (edge, gradient)
            for edge, gradient in zip(edges, gradients, strict=True)
            if edge is not None and gradient is not None
        ]
        if not live:
            return
        found = run_backward([edge for edge, _ in live], [g for _, g in live], leaves)
        del edges, leaves, live, gradients
        left: list[tuple[int, Tensor]] = []
        for place, gradient in zip(tracked, found, strict=True):
            if gradient is not None and place in waiting:
                left.append((place, gradient))
            elif gradient is not None:
                adders[place](gradient)
        if waiting:
            kept[:] = (aside.take(), left)

    return run


def _weights(kept: list[Any], adders: dict[int, Add]) -> Action:
    def run() -> None:
        if not kept:
            return
        pending: list[Later] = kept[0]
        left: list[tuple[int, Tensor]] = kept[1]
        kept.clear()
        for place, gradient in left:
            adders[place](gradient)
        pending.reverse()
        while pending:
            for place, gradient in pending.pop().run():
                adders[place](gradient)

    return run


def _adders(segment: Segment, store: Store, microbatch: int) -> dict[int, Add]:
    """Return, by place of the input, what adds to its gradient."""
    values, found = store.program.values, dict[int, Add]()
    for place, value in enumerate(segment.inputs):
        if (gradient := values[value].gradient) >= 0:
            slot, dtype = store.slot(gradient, microbatch), DTYPES[values[gradient].dtype]
            found[place] = _adder(store, slot, dtype)
    return found


def _adder(store: Store, slot: int, dtype: Any) -> Add:
    def add(gradient: Tensor) -> None:
        # A module that runs as it is may have looked rows up sparsely.
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        store.accumulate(slot, dtype, dense, False)

    return add
