"""The backward of a segment as actions: whole, or in two halves, I and W."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from shardwright.core.program import Kind, Segment
from shardwright.runtime.deferral import Aside, Later
from shardwright.runtime.engine import run_backward
from shardwright.runtime.store import DTYPES, Store
from shardwright.runtime.waiting import Action

# Adds to the gradients of some of a segment's inputs, by their places.
Add = Callable[[Iterable[tuple[int, Tensor]]], None]


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
    add = _adder(segment, store, microbatch)
    if kind == Kind.WEIGHT_GRADIENT:
        return _weights(kept, add)
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
        made = [
            (place, gradient)
            for place, gradient in zip(tracked, found, strict=True)
            if gradient is not None
        ]
        add((place, gradient) for place, gradient in made if place not in waiting)
        if waiting:
            kept[:] = (aside.take(), [one for one in made if one[0] in waiting])

    return run


def _weights(kept: list[Any], add: Add) -> Action:
    def run() -> None:
        if not kept:
            return
        pending: list[Later] = kept[0]
        left: list[tuple[int, Tensor]] = kept[1]
        kept.clear()
        add(left)
        pending.reverse()
        while pending:
            add(pending.pop().run())

    return run


def _adder(segment: Segment, store: Store, microbatch: int) -> Add:
    values = store.program.values
    slots = {
        place: (store.slot(gradient, microbatch), DTYPES[values[gradient].dtype])
        for place, value in enumerate(segment.inputs)
        if (gradient := values[value].gradient) >= 0
    }

    def add(gradients: Iterable[tuple[int, Tensor]]) -> None:
        # A module that runs as it is may have looked rows up sparsely.
        store.accumulate_all(
            (*slots[place], one.to_dense() if one.is_sparse else one) for place, one in gradients
        )

    return add
