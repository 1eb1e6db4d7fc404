"""Instances of phases, one behind the other: the columns of a Program.

A phase is compiled once per stage. Each microbatch is then a shifted copy, and all copies of one are made
together, so that a Program of a million instructions costs little more than its distinct phases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from shardwright.core.program import Kind
from shardwright.planner.lower.compile import Compiled
from shardwright.planner.lower.phases import PREVIOUS, Phase
from shardwright.planner.lower.template import COMPUTES, Flags, Ints

Element = TypeVar("Element", bound=np.generic)


class Part(NamedTuple):
    """Steps of a phase that stand together, all or some of them: at ``rows`` of it."""

    compiled: Compiled
    rows: Ints


def whole(compiled: Compiled) -> Part:
    return Part(compiled, np.arange(len(compiled.kind)))


def parted(compiled: Compiled) -> tuple[Part, Part]:
    """Part a phase into what receives from other meshes, which may be posted ahead, and the rest."""
    receives = compiled.kind == Kind.RECEIVE
    return _part(compiled, receives), _part(compiled, ~receives)


def _part(compiled: Compiled, chosen: Flags) -> Part:
    rows, needed, frees = np.flatnonzero(chosen), compiled.needed, compiled.frees
    place = np.cumsum(chosen) - 1
    waits, freed = chosen[needed.place], frees[:, chosen[frees[0]]]
    part = replace(
        compiled,
        kind=compiled.kind[rows],
        item=compiled.item[rows],
        resource=compiled.resource[rows],
        sizes=compiled.sizes[:, rows],
        frees=np.array([place[freed[0]], freed[1]]),
        needed=needed._replace(
            place=place[needed.place[waits]], writer=needed.writer[waits],
            target=needed.target[waits],
        ),
    )  # fmt: skip
    return Part(part, rows)


class Instances:
    """Instances of parts, one behind the other: the columns of all, made at once."""

    def __init__(self, parts: Sequence[Part], instances: Sequence[tuple[int, int, int]]) -> None:
        """``instances`` are of (part, microbatch, so many microbatches added to the gradients before)."""
        self.parts = parts
        self.part, self.microbatch, self.before = np.array(instances, dtype=np.int64).T
        lengths = np.array([len(part.rows) for part in parts])
        # Of every instruction: its instance, and its step among those of all parts.
        self.instance, self._step = self._each(lengths)
        self.size = len(self.instance)
        self.stop = np.cumsum(lengths[self.part])
        self.base = self.stop - lengths[self.part]
        self._places = _Places(self)
        self._computing, self._computed = self._last_computes()

    def column(self, read: Callable[[Compiled], NDArray[Element]]) -> NDArray[Element]:
        """Return what all instructions have, given that of a part's."""
        return np.concatenate([read(part.compiled) for part in self.parts])[self._step]

    def rows(self) -> Ints:
        """Return the rows of instructions in their phases."""
        return np.concatenate([part.rows for part in self.parts])[self._step]

    def bytes(self) -> tuple[Ints, Ints]:
        """Return what every instruction allocates, and what it needs for a while."""
        sizes = np.concatenate([part.compiled.sizes for part in self.parts], axis=1)
        before = self.before[self.instance]
        allocated = sizes[0][self._step] + np.where(before == 0, sizes[3][self._step], 0)
        return allocated, sizes[np.array([2, 4, 5])[np.minimum(before, 2)], self._step]

    def frees(self) -> tuple[Ints, NDArray[np.int32]]:
        """Return where what each instruction frees begins, and what all of them free."""
        place, value = np.concatenate([part.compiled.frees for part in self.parts], axis=1)
        counts = np.array([part.compiled.frees.shape[1] for part in self.parts])
        instance, entry = self._each(counts)
        return listed(self.base[instance] + place[entry], value[entry], self.size)

    def waits(self, last: Mapping[int, int]) -> tuple[Ints, Ints]:
        """Return (later, earlier) instructions; what stands nowhere yet is not waited for. ``last`` is, by
        stage, the microbatch that adds to its gradients last."""
        needed = [part.compiled.needed for part in self.parts]
        instance, entry = self._each(np.array([len(one.place) for one in needed]))
        later = self.base[instance] + np.concatenate([one.place for one in needed])[entry]
        target = np.concatenate([one.target for one in needed])[entry]
        firsts, keys, microbatches = self._references(last)
        writer = np.concatenate([one.writer for one in needed])[entry]
        writer += firsts[self.part[instance]]
        key, microbatch = keys[writer], microbatches[writer]
        microbatch = np.where(microbatch < 0, self.microbatch[instance], microbatch)
        earlier = self._places.of(np.maximum(key, 0), microbatch, np.where(key < 0, 0, target))
        stages = np.array([part.compiled.stage for part in self.parts])[self.part]
        before = self.computed(stages, np.arange(len(stages)))
        is_previous = np.flatnonzero(key < 0)
        earlier[is_previous] = before[instance[is_previous]] + target[is_previous]
        keep = (earlier >= 0) & (earlier < self.stop[instance])
        return later[keep], earlier[keep]

    def _references(self, last: Mapping[int, int]) -> tuple[Ints, Ints, Ints]:
        """Return where each part's references begin, and of all of them the key (-1: the last compute before)
        and the microbatch (-1: the instance's own)."""
        firsts, found = list[int](), list[tuple[int, int]]()
        for one in (part.compiled for part in self.parts):
            firsts.append(len(found))
            found += [(-1, -1)] * max([number + 1 for number, _, _ in one.references], default=0)
            for number, phase, stage in one.references:
                if phase != PREVIOUS:
                    key = self._places.keys[Phase(phase).instance, stage]
                    found[firsts[-1] + number] = key, _microbatch(Phase(phase), stage, last)
        keys, microbatches = np.array(found, dtype=np.int64).reshape(-1, 2).T
        return np.array(firsts), keys, microbatches

    def computed(self, stages: Ints, instances: Ints) -> Ints:
        """Return where stages have computed last before instances, -1 where they have not."""
        wanted = stages * len(self.part)
        found = np.searchsorted(self._computing, wanted + instances) - 1
        is_known = (found >= 0) & (np.append(self._computing, -1)[found] >= wanted)
        return np.where(is_known, np.append(self._computed, -1)[found], -1)

    def _each(self, counts: Ints) -> tuple[Ints, Ints]:
        """Return instances, each as often as its part has entries (``counts`` of them), and which entry of
        all parts' each is."""
        lengths = counts[self.part]
        instance = np.repeat(np.arange(len(lengths)), lengths)
        shift = (np.cumsum(counts) - counts)[self.part] - (np.cumsum(lengths) - lengths)
        return instance, np.arange(len(instance)) + shift[instance]

    def _last_computes(self) -> tuple[Ints, Ints]:
        """Return the instances that compute, by stage (times their number) and in their order, and the
        place where each does so last."""
        compiled = [part.compiled for part in self.parts]
        computes = np.array([COMPUTES[one.kind].any() for one in compiled], dtype=np.bool_)
        last = np.array([one.needed.last_compute for one in compiled])
        mine = np.flatnonzero((computes & (last >= 0))[self.part])
        part = self.part[mine]
        places = self._places.of(self._places.key[part], self.microbatch[mine], last[part])
        keys = np.array([one.stage for one in compiled])[part] * len(self.part) + mine
        order = np.argsort(keys)
        return keys[order], places[order]


class _Places:
    """Where steps stand: by phase and stage (a key), then a row for each microbatch, or for what runs once."""

    def __init__(self, layout: Instances) -> None:
        parts, count = layout.parts, layout.size
        self.keys: dict[tuple[int, int], int] = {}
        for one in (part.compiled for part in parts):
            self.keys.setdefault((one.phase.instance, one.stage), len(self.keys))
        self.key = np.array([self.keys[p.compiled.phase.instance, p.compiled.stage] for p in parts])
        self._width = np.zeros(len(self.keys), dtype=np.int64)
        widths = np.array([part.rows.max(initial=-1) + 1 for part in parts])
        np.maximum.at(self._width, self.key, widths)
        most = np.ones(len(self.keys), dtype=np.int64)
        np.maximum.at(most, self.key[layout.part], layout.microbatch + 1)
        self._first = np.cumsum(most * self._width) - most * self._width
        # What stands nowhere stands behind all.
        self._place = np.full(int((most * self._width).sum()), count)
        instance, row = layout.instance, layout.rows()
        places = self._at(self.key[layout.part[instance]], layout.microbatch[instance], row)
        self._place[places] = np.arange(count)

    def of(self, key: Ints, microbatch: Ints, row: Ints) -> Ints:
        """Return where steps stand, given their row in a phase."""
        return self._place[self._at(key, microbatch, row)]

    def _at(self, key: Ints, microbatch: Ints, row: Ints) -> Ints:
        return self._first[key] + np.maximum(microbatch, 0) * self._width[key] + row


def _microbatch(phase: Phase, stage: int, last: Mapping[int, int]) -> int:
    """Return of which microbatch an instance of a phase is that others wait for, -1 where it is their own."""
    if phase is Phase.LAST:
        return last[stage]
    return -1 if phase.is_each else 0


def listed(rows: Ints, values: Ints, count: int) -> tuple[Ints, NDArray[np.int32]]:
    """Return where what belongs to each of so many rows begins, and all of it, row by row in the order given."""
    offset = np.zeros(count + 1, dtype=np.int64)
    np.cumsum(np.bincount(rows, minlength=count), out=offset[1:])
    return offset, values[np.argsort(rows, kind="stable")].astype(np.int32)
