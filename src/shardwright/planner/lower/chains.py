"""Values that stand for the same thing in every block, and the numbers of those left out.

A *chain* is a list of values, one per block. In a short graph (``folded``) it has gaps; ``expand``
asks here which value of the whole graph stands where one of the short graph does, some blocks on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from shardwright.planner.lower.builder import ProgramBuilder
from shardwright.planner.lower.fold import Run, Short
from shardwright.planner.lower.template import Facts, Ints

Element = TypeVar("Element", bound=np.generic)


class Irregular(Exception):
    """Blocks that are alike were not lowered alike; the whole graph must be lowered."""


class Chains:
    """The values of a short graph by chain, and the numbers of those that are missing.

    A value keeps its number; copies get numbers behind all of them, block by block. ``block`` is
    where in the short graph a value belongs (-1: nowhere), ``shift`` how many blocks are missing
    before a block, ``numbers`` the values of chains by the block of the whole graph.
    """

    def __init__(self, builder: ProgramBuilder, short: Short, runs: Sequence[Run]) -> None:
        self.runs = runs
        tensor = np.array([value.tensor for value in builder.values], dtype=np.int64)
        mesh = np.array(builder.meshes)
        # What belongs to other blocks is the same value wherever it is read.
        families = short.family[[run.position for run in runs]]
        home = np.where(np.isin(short.family, families), np.arange(len(short.family)), -1)
        self.block = np.append(home, -1)[short.home[tensor]]
        positions = np.arange(len(short.blocks))
        self.shift = np.zeros(len(positions), dtype=np.int64)
        for run in runs:
            self.shift[positions > run.template] += run.dropped
        self.chain = self._find_chains(short, tensor, mesh)
        count = len(positions) + sum(run.dropped for run in runs)
        self.numbers = np.full((int(self.chain.max(initial=-1)) + 1, count), -1)
        mine = np.flatnonzero(self.block >= 0)
        at = self.block[mine]
        self.numbers[self.chain[mine], at + self.shift[at]] = mine
        self.templates, self.size = list[Ints](), len(tensor)
        for run in runs:
            self._number_copies(run)
        self.times = np.ones(len(tensor), dtype=np.int64)
        for run, template in zip(runs, self.templates, strict=True):
            self.times[template] += run.dropped

    def _find_chains(self, short: Short, tensor: Ints, mesh: Ints) -> Ints:
        """Number chains: values of the tensors at one place of their blocks, on one mesh, in the order
        in which they were made. Meshes count apart: one may make values that another does not."""
        group = tensor * (int(mesh.max(initial=0)) + 1) + mesh
        order = np.argsort(group, kind="stable")
        first = np.searchsorted(group[order], group[order])
        rank = np.empty(len(order), dtype=np.int64)
        rank[order] = np.arange(len(order)) - first
        rows = np.stack([short.family[self.block], short.place[tensor], mesh, rank], axis=1)
        chain = np.full(len(tensor), -1)
        mine = self.block >= 0
        chain[mine] = np.unique(rows[mine], axis=0, return_inverse=True)[1].reshape(-1)
        return chain

    def _number_copies(self, run: Run) -> None:
        at = run.template + int(self.shift[run.template])
        chains = np.flatnonzero(self.numbers[:, at] >= 0)
        template = self.numbers[chains, at]
        copies = self.size + np.arange(run.dropped * len(chains)).reshape(run.dropped, len(chains))
        self.numbers[chains, at + 1 : at + 1 + run.dropped] = copies.T
        self.size += copies.size
        self.templates.append(template)

    def repeated(self, values: Sequence[int]) -> list[int]:
        """List values, each as often as the whole graph has it."""
        listed = np.array(values, dtype=np.int64)
        return np.repeat(listed, self.times[listed]).tolist()

    def facts(self, facts: Facts) -> Facts:
        """Add the facts of copies, which are those of what they were made from.

        Raises Irregular where the blocks around those differ in them.
        """
        columns = (facts.bytes, facts.mesh, facts.marks, facts.reported)
        for link in (facts.root, facts.storage):
            fixed = self.chain[link] < 0
            columns += (self.chain[link], np.where(fixed, link, self.block[link] - self.block))
        for run in self.runs:
            self._check_alike(run, columns)
        return Facts(
            bytes=self._column(facts.bytes),
            root=self._links(facts.root),
            storage=self._links(facts.storage),
            mesh=self._column(facts.mesh),
            marks=self._column(facts.marks),
            reported=self._column(facts.reported),
        )

    def _column(self, values: NDArray[Element]) -> NDArray[Element]:
        parts = [np.tile(values[template], run.dropped) for run, template in self._copies()]
        return np.concatenate([values, *parts])

    def _links(self, link: Ints) -> Ints:
        """Let copies link to copies, and blocks behind a gap to those in it."""
        own = self.block >= 0
        linked = link.copy()
        linked[own] = self.moved(link[own], self.shift[self.block[own]])
        parts = [linked]
        for run, template in self._copies():
            turns = 1 + int(self.shift[run.template]) + np.arange(run.dropped)
            links = np.tile(link[template], run.dropped)
            parts.append(self.moved(links, np.repeat(turns, len(template))))
        return np.concatenate(parts)

    def _copies(self) -> list[tuple[Run, Ints]]:
        return list(zip(self.runs, self.templates, strict=True))

    def _check_alike(self, run: Run, columns: Sequence[NDArray[np.generic]]) -> None:
        """Raise Irregular unless the blocks around the copied one have the same values as it."""
        at = run.template + int(self.shift[run.template])
        own = self.numbers[:, at]
        for there in (at - 2, at - 1, at + run.dropped + 1, at + run.dropped + 2):
            other = self.numbers[:, there]
            if not np.array_equal(own >= 0, other >= 0):
                raise Irregular
            mine = own >= 0
            if not all(np.array_equal(c[own[mine]], c[other[mine]]) for c in columns):
                raise Irregular

    def moved(self, values: Ints, shift: Ints) -> Ints:
        """Return the values that stand where others do, so many blocks further in the whole graph
        than these stand in the short one."""
        chain = self.chain[values]
        mine = chain >= 0
        at = (self.block[values] + shift)[mine]
        if ((at < 0) | (at >= self.numbers.shape[1])).any():
            raise Irregular
        result = values.copy()
        result[mine] = self.numbers[chain[mine], at]
        if (result < 0).any():
            raise Irregular
        return result
