"""The terms of a problem: what a few decisions cost, in seven columns.

Seconds come in four kinds because they count differently: ``EACH`` microbatch or ``ONCE`` a step on
the compute stream's path, and two kinds that can hide behind computation, parameter ``GATHER``
(each microbatch) and gradient ``SYNC`` (once). Bytes come in three: ``KEPT`` for the whole step,
kept per microbatch in ``FLIGHT``, and ``TRANSIENT``, needed by one block at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwright.planner.solve.network import Network, Places, flat

KINDS = range(7)
EACH, ONCE, GATHER, SYNC, KEPT, FLIGHT, TRANSIENT = KINDS
NUM_COLUMNS = len(KINDS)
Columns = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Term:
    """Costs of the joint choices of ``scope`` (ascending), once in each of ``blocks``.

    ``columns`` has the seven kinds first, then one axis per variable. Forbidden choices are
    infinite in ``EACH`` and nowhere else.
    """

    scope: tuple[int, ...]
    columns: Columns
    blocks: tuple[int, ...]


def term(variables: Sequence[int | None], columns: Columns, blocks: tuple[int, ...]) -> Term:
    """Return the term of columns with an axis for each variable, in any order. Of a variable that has two
    only equal choices stay; for None there is one choice, and its axis goes."""
    columns = columns[(slice(None), *[0 if v is None else slice(None) for v in variables])]
    axes = [variable for variable in variables if variable is not None]
    scope = sorted(set(axes))
    if axes == scope:
        return Term(tuple(scope), columns, blocks)
    names = dict(zip(scope, "abcdefgh", strict=False))
    given, wanted = ("".join(names[variable] for variable in of) for of in (axes, scope))
    return Term(tuple(scope), np.einsum(f"k{given}->k{wanted}", columns), blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """How the columns add up to seconds per step and bytes on a device, under one way to pipeline.

    ``exposed`` is the share of ``GATHER`` that computation does not hide, ``synced`` that of
    ``SYNC``.
    """

    each: float
    once: float
    exposed: float
    synced: float
    kept: float = 1.0
    flight: float = 1.0
    transient: float = 1.0

    @property
    def seconds(self) -> NDArray[np.float64]:
        """Weights of the first four columns."""
        return np.array([self.each, self.once, self.each * self.exposed, self.once * self.synced])

    def views(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return what every column weighs in seconds, and in bytes."""
        nothing = np.zeros(NUM_COLUMNS - KEPT)
        memory = np.array([self.kept, self.flight, self.transient])
        return np.concatenate([self.seconds, nothing]), np.concatenate([np.zeros(KEPT), memory])


def network(
    sizes: tuple[int, ...], terms: list[Term], apart: frozenset[int] = frozenset()
) -> Network:
    """Add up, over all blocks, every kind but a transient, which tied blocks need one at a time. What
    the blocks ``apart`` cost are kinds of their own, behind the others."""
    tables: list[tuple[tuple[int, ...], Columns]] = []
    for term in terms:
        columns = term.columns * float(len(term.blocks))
        columns[TRANSIENT] = term.columns[TRANSIENT]
        tables.append((term.scope, _parted(columns, apart, term.blocks) if apart else columns))
    return Network(sizes, tables)


def _parted(columns: Columns, apart: frozenset[int], blocks: tuple[int, ...]) -> Columns:
    """Return the kinds of costs twice: those of other blocks, and those of the blocks apart."""
    is_apart = apart.issuperset(blocks)
    found = np.zeros((2, *columns.shape))
    found[int(is_apart)] = columns
    if is_apart:
        found[:, EACH, np.isinf(columns[EACH])] = np.array([[np.inf], [0.0]])  # forbidden choices
    return found.reshape(-1, *columns.shape[1:])


class ByBlock:
    """The terms of a problem, prepared to say what assignments cost in every block."""

    def __init__(self, sizes: Sequence[int], terms: Sequence[Term], num_blocks: int) -> None:
        self._columns, base = flat([(one.scope, one.columns) for one in terms])
        self._places = Places(sizes, [one.scope for one in terms], base)
        classes = {
            blocks: number for number, blocks in enumerate(dict.fromkeys(t.blocks for t in terms))
        }
        self._class_of = np.array([classes[one.blocks] for one in terms], np.int64)
        self._times = [np.bincount(blocks, minlength=num_blocks) for blocks in classes]

    def of(self, assignment: tuple[int, ...]) -> Columns:
        """Return the columns of an assignment, block by block: shape (7, num_blocks)."""
        (places,) = self._places.of(np.array([assignment], np.int32))
        sums = np.zeros((len(self._times), NUM_COLUMNS))
        np.add.at(sums, self._class_of, self._columns[:, places].T)  # one by one
        total = np.zeros((NUM_COLUMNS, len(self._times[0])))
        for column, times in zip(sums, self._times, strict=True):
            total += column[:, None] * times[None, :]
        return total
