"""Outputs besides the loss, put together from what ranks and microbatches made of them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from shardwright.core.layout import PARTIAL, is_split, shard_offsets, whole_shape
from shardwright.core.program import Output, Program
from shardwright.errors import InputError
from shardwright.runtime.segment import Site
from shardwright.runtime.store import DTYPES, Store
from shardwright.runtime.world import World


def slots_of(program: Program, store: Store, value: int) -> list[int]:
    """Return the slots of what the microbatches make of a value, in order."""
    pieces = range(program.strategy.pipeline.num_microbatches)
    return list(dict.fromkeys(store.slot(value, piece) for piece in pieces))


def counts(program: Program, value: int, site: Site) -> bool:
    """Whether a device counts a value in sums over the world: replicas count once, terms all."""
    layout = program.values[value].layout
    return all(
        place == 0
        for placement, place in zip(layout, site.coordinate, strict=True)
        if not is_split(placement) and placement != PARTIAL
    )


def choose(program: Program, names: Iterable[str]) -> list[Output]:
    """Return outputs by name."""
    known = {output.name: output for output in program.outputs}
    missing = [name for name in names if name not in known]
    if missing:
        raise InputError(
            f"this plan reports {', '.join(known) or 'nothing besides the loss'}, not "
            f"{missing[0][:40]!r}; name it where the model is planned (Request(outputs=...))"
        )
    return [known[name] for name in names]


def collect(
    program: Program, store: Store, sites: dict[int, Site], world: World, output: Output
) -> Tensor:
    """Return an output whole on every rank (a collective call).

    Numbers that are summed over samples add up in float64, all else keeps its dtype.
    """
    entry = program.values[output.value]
    mesh = program.meshes[entry.mesh]
    dtype = DTYPES[entry.dtype]
    shape = list(whole_shape(entry.shape, entry.layout, mesh.sizes))
    slots = slots_of(program, store, output.value)
    step = 0
    if output.along >= 0:
        step = shape[output.along]
        shape[output.along] *= len(slots)
    is_number = output.adds and not shape and dtype.is_floating_point
    summed = torch.float64 if is_number else torch.uint8 if dtype is torch.bool else dtype
    device = next(iter(sites.values())).device
    whole = torch.zeros(shape, dtype=summed, device=device)
    site = sites.get(entry.mesh)
    if site is not None and counts(program, output.value, site):
        piece_shape = list(shape)
        if output.along >= 0:
            piece_shape[output.along] = step
        offsets = shard_offsets(tuple(piece_shape), entry.layout, mesh.sizes, site.coordinate)
        for number, slot in enumerate(slots if output.adds or step else slots[:1]):
            place = whole
            for dim, (start, length) in enumerate(zip(offsets, entry.shape, strict=True)):
                first = start + (number * step if dim == output.along else 0)
                place = place.narrow(dim, first, length)
            held = store.data[slot]
            place += torch.nan if held is None else held.to(summed)
    return world.all_reduce(whole).wait().to(torch.float64 if is_number else dtype)
