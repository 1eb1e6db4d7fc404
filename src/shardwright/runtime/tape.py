"""What autograd records of segments whose backwards are one (``core.joining``), from their forwards on.

A value that one of them makes and another reads is handed over as autograd made it, if its reader's gradient is the one
that its maker begins with. Whatever else they read is a leaf, one for all of them, so that its gradients add up
as they come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shardwright.core.program import Segment
from shardwright.runtime.store import Store


@dataclass(frozen=True, slots=True)
class Track:
    """The places of one segment on a tape.

    ``activations`` are (place among its inputs, leaf, whether no segment before reads it), ``edges`` the first of
    its outputs' and one behind the last; the outputs at the places ``handed`` are read by others.
    """

    activations: tuple[tuple[int, int, bool], ...]
    leaf_of: Mapping[int, int]  # by place
    edges: tuple[int, int]
    handed: frozenset[int]


class Tape:
    """Edges by which gradients come in, and the leaves whose gradients are wanted, those of parameters for good."""

    def __init__(
        self,
        segments: Sequence[Segment],
        store: Store,
        lasting: Mapping[int, Tensor],
        instance: int,
    ) -> None:
        values = store.program.values
        self._store, self._instance = store, instance
        self.leaves: list[Any] = []
        self.gradients: list[int] = []  # by leaf, the value that its gradient is added to
        self.incoming: list[int] = []  # by edge, the slot of its gradient
        self.slots: list[int] = []  # where that is
        self.left: Any = None  # for the second half of a split backward
        self._passing: list[int] = []
        self._numbers: dict[tuple[str, int, int], int] = {}
        made: dict[tuple[int, int], tuple[int, int]] = {}
        handed: list[set[int]] = [set() for _ in segments]
        tracks: list[Track] = []
        for number, segment in enumerate(segments):
            activations, leaf_of = list[tuple[int, int, bool]](), dict[int, int]()
            for place, value in enumerate(segment.inputs):
                gradient = values[value].gradient
                ends = (store.root(value), gradient)
                if gradient < 0:
                    continue
                if ends in made:
                    maker, output = made[ends]
                    handed[maker].add(output)
                    continue
                parameter = lasting.get(value)
                leaf, is_first = self._leaf(ends, parameter)
                leaf_of[place] = leaf
                if parameter is None:
                    activations.append((place, leaf, is_first))
            begin = len(self.incoming)
            for place, value in enumerate(segment.outputs):
                if (gradient := values[value].gradient) >= 0:
                    made[store.root(value), gradient] = number, place
                    self.incoming.append(store.slot(gradient, instance))
            edges = (begin, len(self.incoming))
            tracks.append(Track(tuple(activations), leaf_of, edges, frozenset()))
        self.tracks = [
            Track(one.activations, one.leaf_of, one.edges, frozenset(places))
            for one, places in zip(tracks, handed, strict=True)
        ]
        self.edges: list[Any] = [None] * len(self.incoming)

    def _leaf(self, ends: tuple[int, int], parameter: Tensor | None) -> tuple[int, bool]:
        """Return the number of a leaf, and whether it is new."""
        key = ("", *ends) if parameter is None else ("parameter", id(parameter), ends[1])
        is_first = key not in self._numbers
        if is_first:
            self._numbers[key] = len(self.leaves)
            if parameter is None:
                self._passing.append(len(self.leaves))
            self.leaves.append(parameter)
            self.gradients.append(ends[1])
            self.slots.append(self._store.slot(ends[1], self._instance))
        return self._numbers[key], is_first

    def take(self) -> tuple[list[Any], list[Tensor]]:
        """Return edges and leaves, and hold none of what forward made any longer."""
        edges, leaves = self.edges, self.leaves
        self.edges, self.leaves = [None] * len(edges), leaves.copy()
        for leaf in self._passing:
            self.leaves[leaf] = None
        return edges, leaves
