"""What one example call teaches: which dims of which tensors may be cut at the same time.

Every way to cut is tried at several random shapes, forward and backward. A kernel that does not look
at the shapes of its pieces may read out of bounds, so this should run isolated.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

from shardwright.core.example import Call
from shardwright.core.layout import PARTIAL, REPLICATE
from shardwright.errors import InputError
from shardwright.runtime.rules import Axis, Case, Differ, Refused
from shardwright.verbs.rules import calls

SHAPES = 4  # random ones per example
MOST_HYPOTHESES = 200  # per size, and per example
MOST_TERMS = 4  # to be tried as counted once
# How a tensor and its gradient lie where it is not cut: copies whose gradients are terms, or terms.
COPIED, SUMMED = (REPLICATE, PARTIAL), (PARTIAL, REPLICATE)


@dataclass(frozen=True, slots=True)
class Finding:
    """What one example call taught: how it may be cut, and which inputs sums pass through."""

    names: tuple[str, ...]
    inputs: tuple[tuple[str, ...], ...]
    outputs: tuple[tuple[str, ...], ...]
    once: frozenset[int]
    mean: tuple[str, ...]
    linear: tuple[int, ...]

    @property
    def line(self) -> tuple[str, str, str]:
        """The arguments of ``equation``: text, mean, linear."""
        terms = [
            " ".join(["+" * (at in self.once) + name, *(one or "_" for one in dims)])
            for at, (name, dims) in enumerate(zip(self.names, self.inputs, strict=True))
            if any(dims) or at in self.once
        ]
        results = [" ".join(one or "_" for one in dims) for dims in self.outputs]
        passing = " ".join(self.names[at] for at in self.linear)
        text = f"{', '.join(terms)} -> {', '.join(results)}".strip()
        return text, " ".join(self.mean), passing


def learn(kind: str, example: Call, random: Random, differ: Differ) -> Finding | None:
    """Try every way to cut a call; None where nothing may be cut or values cannot be compared."""
    try:
        cases = [case for case, _ in calls(kind, (example,), SHAPES, random, distinct=True)]
    except (InputError, Refused):
        return None
    first = cases[0]
    if first.is_random or not first.results:
        return None
    ranks = _ranks(first)
    cases = [case for case in cases if _ranks(case) == ranks and case.names == first.names]
    found = _splits(cases, differ)
    linear = _linear(cases, differ)
    return _write(first, found, linear) if found or linear else None


def _splits(cases: Sequence[Case], differ: Differ) -> list[tuple[tuple[int, ...], Axis]]:
    """Return the cuts that hold, in the order of the results' dims; each dim of a tensor is in one at most."""
    count = len(cases[0].tensors)
    taken: set[tuple[int, int]] = set()
    found: list[tuple[tuple[int, ...], Axis]] = []
    for dims in itertools.islice(_hypotheses(cases), MOST_HYPOTHESES):
        used = {(tensor, dim) for tensor, dim in enumerate(dims) if dim >= 0}
        if used & taken:
            continue
        axis = _holds(cases, dims, count, differ)
        if axis is not None:
            found.append((dims, axis))
            taken |= used
    return sorted(found, key=lambda one: _order(one[0], count))


def _hypotheses(cases: Sequence[Case]) -> Iterator[tuple[int, ...]]:
    """Yield, per tensor, the dim to cut or -1: dims of the same size at all shapes, most first."""
    sizes: dict[tuple[int, ...], dict[int, list[int]]] = {}
    for tensor, rank in enumerate(_ranks(cases[0])):
        for dim in range(rank):
            size = tuple(_shapes(case)[tensor][dim] for case in cases)
            if min(size) > 1:
                sizes.setdefault(size, {}).setdefault(tensor, []).append(dim)
    count = len(_ranks(cases[0]))
    for places in sizes.values():
        options = [[*places.get(tensor, ()), -1] for tensor in range(count)]
        product = itertools.islice(itertools.product(*options), MOST_HYPOTHESES)
        yield from sorted(product, key=lambda dims: (dims.count(-1), dims))[: MOST_HYPOTHESES - 1]


def _holds(cases: Sequence[Case], dims: tuple[int, ...], count: int, differ: Differ) -> Axis | None:
    """Return how the cut holds on all shapes: as it is, as a mean, or with terms counted once."""
    if max(dims) < 0:
        return None
    for axis in _ways(cases[0], dims, count):
        if all(_passes(case, axis, dims, differ) for case in cases):
            return axis
    return None


def _ways(case: Case, dims: tuple[int, ...], count: int) -> Iterator[Axis]:
    """Yield what a cut may mean. Results that are not cut are sums, which booleans and unsigned numbers do not have."""
    sums = [result for result, dim in zip(case.results, dims[count:], strict=True) if dim < 0]
    if any(result.dtype.is_signed is False for result in sums):
        return
    plain = Axis(pieces=2, inputs=_ends(dims[:count], COPIED), outputs=_ends(dims[count:], SUMMED))
    yield plain
    if sums:
        yield replace(plain, scale=True)
        terms = [at for at in range(count) if dims[at] < 0 and case.differentiable[at]]
        yield from (replace(plain, once=(at,)) for at in terms[:MOST_TERMS])


def _passes(case: Case, axis: Axis, dims: tuple[int, ...], differ: Differ) -> bool:
    shape, dim = next((s, d) for s, d in zip(_shapes(case), dims, strict=True) if d >= 0)
    pieces = next(count for count in range(2, shape[dim] + 1) if shape[dim] % count == 0)
    return differ(case, [replace(axis, pieces=pieces)])[0] <= 1


def _ends(dims: tuple[int, ...], whole: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    """Return how tensors and their gradients lie that are cut along these dims, or lie ``whole``."""
    return tuple((dim, dim) if dim >= 0 else whole for dim in dims)


def _linear(cases: Sequence[Case], differ: Differ) -> tuple[int, ...]:
    """Return the inputs, as many as can be, through which a partial sum passes."""
    places = range(len(cases[0].tensors))
    floats = list(itertools.compress(places, cases[0].differentiable))
    if not all(result.is_floating_point() for result in cases[0].results) or len(floats) > 6:
        return ()
    for size in range(len(floats), 0, -1):
        for chosen in itertools.combinations(floats, size):
            axis = Axis(
                pieces=2,
                inputs=tuple(SUMMED if at in chosen else COPIED for at in places),
                outputs=(SUMMED,) * len(cases[0].results),
            )
            if all(differ(case, [axis])[0] <= 1 for case in cases):
                return chosen
    return ()


def _write(
    case: Case, found: Sequence[tuple[tuple[int, ...], Axis]], linear: tuple[int, ...]
) -> Finding:
    """Name the dims: ``d0, d1`` where the result has them, ``k0, k1`` where it is a sum."""
    count = len(case.tensors)
    rows = [[""] * len(shape) for shape in _shapes(case)]
    numbers: Counter[str] = Counter()
    mean: list[str] = []
    for dims, axis in found:
        letter = "k" if min(dims[count:]) < 0 else "d"
        name = f"{letter}{numbers[letter]}"
        numbers[letter] += 1
        for row, dim in zip(rows, dims, strict=True):
            if dim >= 0:
                row[dim] = name
        mean += [name] if axis.scale else []
    named = [tuple(row) for row in rows]
    return Finding(
        names=case.names,
        inputs=tuple(named[:count]),
        outputs=tuple(named[count:]),
        once=frozenset(at for _, axis in found for at in axis.once),
        mean=tuple(mean),
        linear=linear,
    )


def _order(dims: tuple[int, ...], count: int) -> tuple[bool, tuple[int, ...]]:
    return min(dims[count:]) < 0, (*dims[count:], *dims[:count])


def _shapes(case: Case) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for tensor in (*case.tensors, *case.results)]


def _ranks(case: Case) -> tuple[int, ...]:
    return tuple(len(shape) for shape in _shapes(case))
