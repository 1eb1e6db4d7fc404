"""The backward of a segment as actions: whole, or in two halves, I and W."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from shardwright.core.program import Kind, Segment
from shardwright.runtime.deferral import Aside, Later
from shardwright.runtime.engine import by_place, run_backward
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
    incoming = [
        store.slot(gradient, microbatch)
        for gradient in gradients_of(store, segment.outputs).values()
    ]
    tracked = list(gradients_of(store, segment.inputs))
    waiting = _waiting(segment, store) if kind == Kind.INPUT_GRADIENT else set[int]()
    data = store.data

    def run() -> None:
        edges, leaves = kept
        kept.clear()
        edges, gradients = _live(edges, [data[slot] for slot in incoming])
        if not edges:
            return
        found = run_backward(edges, gradients, leaves)
        del edges, leaves, gradients
        made = by_place(tracked, found)
        add((place, gradient) for place, gradient in made if place not in waiting)
        if waiting:
            kept[:] = (aside.take(), [one for one in made if one[0] in waiting])

    return run


def gradients_of(store: Store, values: Sequence[int]) -> dict[int, int]:
    """Return, by place, the gradients of those values that have one."""
    entries = store.program.values
    found = {place: entries[value].gradient for place, value in enumerate(values)}
    return {place: gradient for place, gradient in found.items() if gradient >= 0}


def _waiting(segment: Segment, store: Store) -> set[int]:
    """Return the places of inputs whose gradients are for W to add."""
    made = made_by(segment, store, Kind.WEIGHT_GRADIENT)
    return {place for place, gradient in enumerate(made) if gradient >= 0}


def _live(edges: Sequence[Any], gradients: Sequence[Tensor | None]) -> tuple[list[Any], list[Any]]:
    """Return the edges that gradients flow into, with these."""
    pairs = zip(edges, gradients, strict=True)
    live = [pair for pair in pairs if pair[0] is not None and pair[1] is not None]
    return [edge for edge, _ in live], [gradient for _, gradient in live]


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
        for place, gradient in gradients_of(store, segment.inputs).items()
    }

    def add(gradients: Iterable[tuple[int, Tensor]]) -> None:
        # A module that runs as it is may have looked rows up sparsely.
        store.accumulate_all(
            (*slots[place], one.to_dense() if one.is_sparse else one) for place, one in gradients
        )

    return add
