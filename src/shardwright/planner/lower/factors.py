"""PowerSGD: sums over devices as products of two factors of low rank (Vogels et al., NeurIPS 2019).

A device's gradient, seen as a matrix, is multiplied by the right factor of the step before; the sum of
those products, made orthogonal, is the left factor; and what gradients give multiplied by that adds up to
the new right factor. So only factors are summed over devices.
"""

from __future__ import annotations

from shardwright.core.compression import factor_shapes
from shardwright.core.layout import PARTIAL, REPLICATE
from shardwright.planner.lower.builder import Step
from shardwright.planner.lower.lot import Lot, state_of


def factored(lot: Lot) -> list[Step]:
    """Return the steps that send factors, and write the sums."""
    builder, rank = lot.builder, lot.sync.feedback.rank
    shapes = [builder.values[source].shape for source in lot.sources]
    forms = [factor_shapes(shape, rank) for shape in shapes]
    factors = tuple(
        [
            state_of(builder, result, "factor", lot.wide, right)
            for result, (_, right) in zip(lot.results, forms, strict=True)
        ]
    )
    ends = list(zip(lot.sources, shapes, forms, strict=True))
    whole = tuple([lot.value(source, shape, PARTIAL) for source, shape, _ in ends])
    left, lefts, right, rights = (
        tuple([lot.value(source, form[side], placement) for source, _, form in ends])
        for side in (0, 1)
        for placement in (PARTIAL, REPLICATE)
    )
    basis = tuple([lot.value(source, form[0], REPLICATE) for source, _, form in ends])
    said = lot.pack_constants() | {"states": 1 + bool(lot.residuals)}
    # Nothing is written to states before all devices know that what came is finite.
    seen = (*lot.residuals, *factors)
    first = lot.transform("left factor", lot.sources, (*whole, *left), seen=seen, said=said)
    second = lot.transform("right factor", (*whole, *lefts), (*basis, *right))
    third = lot.transform(
        "factor sum",
        (*whole, *basis, *rights),
        lot.results,
        (*lot.residuals, *factors),
        said={"dtype": lot.wide, "gradients": len(lot.results), "ranks": lot.ranks},
    )
    return [first, _sum(lot, left, lefts), second, _sum(lot, right, rights), third]


def _sum(lot: Lot, terms: tuple[int, ...], sums: tuple[int, ...]) -> Step:
    size = sum(lot.builder.values[one].bytes for one in terms)
    return lot.message("all_reduce", terms, sums, size)
