"""The backward of segments as actions: whole, or of one in two halves, I and W."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from shardwright.core.program import Kind, Segment
from shardwright.runtime.deferral import Aside, Later
from shardwright.runtime.engine import by_place, run_backward
from shardwright.runtime.store import DTYPES, Store
from shardwright.runtime.tape import Tape
from shardwright.runtime.waiting import Action

# Adds to the gradients of some leaves of a tape.
Add = Callable[[Iterable[tuple[int, Tensor]]], None]


def made_by(segment: Segment, store: Store, kind: Kind) -> list[int]:
    """Return, for every input of a segment, the value of the gradient that a backward of this kind makes,
    -1 where it makes none: I makes those of activations, W those of parameters."""
    values, other = store.program.values, {True: Kind.INPUT_GRADIENT, False: Kind.WEIGHT_GRADIENT}
    return [
        -1 if kind == other[values[value].role == "parameter"] else values[value].gradient
        for value in segment.inputs
    ]


def backward(kind: Kind, segment: Segment, store: Store, tape: Tape, aside: Aside) -> Action:
    """Return the action of a whole backward, of all segments on the tape, or of a half, of its only one.

    I leaves to W on the ``tape`` what products put ``aside`` and the gradients of parameters that were found on the way.
    """
    add = _adder(store, tape)
    if kind == Kind.WEIGHT_GRADIENT:
        return _weights(tape, add)
    waiting = _waiting(segment, store, tape) if kind == Kind.INPUT_GRADIENT else set[int]()
    data, incoming = store.data, tape.incoming

    def run() -> None:
        edges, leaves = tape.take()
        edges, gradients = _live(edges, [data[slot] for slot in incoming])
        if not edges:
            return
        found = run_backward(edges, gradients, leaves)
        del edges, leaves, gradients
        made = by_place(range(len(found)), found)
        add((leaf, gradient) for leaf, gradient in made if leaf not in waiting)
        if waiting:
            tape.left = (aside.take(), [one for one in made if one[0] in waiting])

    return run


def _waiting(segment: Segment, store: Store, tape: Tape) -> set[int]:
    """Return the leaves whose gradients are for W to add."""
    made = made_by(segment, store, Kind.WEIGHT_GRADIENT)
    return {tape.tracks[0].leaf_of[place] for place, gradient in enumerate(made) if gradient >= 0}


def _live(edges: Sequence[Any], gradients: Sequence[Tensor | None]) -> tuple[list[Any], list[Any]]:
    """Return the edges that gradients flow into, with these."""
    pairs = zip(edges, gradients, strict=True)
    live = [pair for pair in pairs if pair[0] is not None and pair[1] is not None]
    return [edge for edge, _ in live], [gradient for _, gradient in live]


def _weights(tape: Tape, add: Add) -> Action:
    leaf_of = tape.tracks[0].leaf_of

    def run() -> None:
        if tape.left is None:
            return
        pending: list[Later] = tape.left[0]
        left: list[tuple[int, Tensor]] = tape.left[1]
        tape.left = None
        add(left)
        pending.reverse()
        while pending:
            add((leaf_of[place], gradient) for place, gradient in pending.pop().run())

    return run


def _adder(store: Store, tape: Tape) -> Add:
    slots = [
        (slot, DTYPES[store.program.values[gradient].dtype])
        for slot, gradient in zip(tape.slots, tape.gradients, strict=True)
    ]

    def add(gradients: Iterable[tuple[int, Tensor]]) -> None:
        # A module that runs as it is may have looked rows up sparsely.
        store.accumulate_all(
            (*slots[leaf], one.to_dense() if one.is_sparse else one) for leaf, one in gradients
        )

    return add
