"""The batch: check it, and cut this rank's shard of every microbatch out of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from shardwright.core.halo import own_shape
from shardwright.core.layout import shard_dim, shard_offsets
from shardwright.core.program import Program, Value
from shardwright.errors import InputError
from shardwright.runtime.capture import Captured
from shardwright.runtime.halos import pad
from shardwright.runtime.segment import Site
from shardwright.runtime.store import DTYPES, Store

Batch = Mapping[str, Tensor] | Sequence[Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """One input value of one microbatch: where it lies in the global tensor ``name``.

    Where it reaches beyond that tensor, ``beyond`` has (dim, rows before, rows after, value).
    """

    name: str
    value: int
    microbatch: int
    ranges: tuple[tuple[int, int, int], ...]
    dtype: torch.dtype
    beyond: tuple[tuple[int, int, int, float], ...] = ()


def compile_inputs(
    captured: Captured, program: Program, sites: Mapping[int, Site]
) -> tuple[Cut, ...]:
    """Return every cut that this rank needs in a step."""
    pieces = program.strategy.pipeline.num_microbatches
    cuts: list[Cut] = []
    for index, value in enumerate(program.values):
        if value.role != "input" or value.mesh not in sites or value.alias >= 0:
            continue
        spec = captured.graph.tensors[value.tensor]
        for microbatch in range(pieces if value.scope == "microbatch" else 1):
            ranges = _ranges(spec.shape, value, sites[value.mesh], pieces, microbatch)
            ranges, beyond = _with_halos(spec.shape, ranges, value)
            cuts.append(
                Cut(
                    name=spec.name,
                    value=index,
                    microbatch=microbatch,
                    ranges=ranges,
                    dtype=DTYPES[value.dtype],
                    beyond=beyond,
                )
            )
    return tuple(cuts)


def _ranges(
    shape: tuple[int, ...], value: Value, site: Site, pieces: int, microbatch: int
) -> tuple[tuple[int, int, int], ...]:
    """Return (dim, start, size) wherever a shard is not the whole tensor.

    The dim that a microbatch takes a piece of is the one which its shards do not cover.
    """
    shards = [1] * len(shape)
    for placement, count in zip(value.layout, site.mesh.sizes, strict=True):
        if shard_dim(placement) >= 0:
            shards[shard_dim(placement)] *= count
    own = own_shape(value.shape, value.halos)
    covered = [size * count for size, count in zip(own, shards, strict=True)]
    offsets = shard_offsets(tuple(covered), value.layout, site.mesh.sizes, site.coordinate)
    ranges: list[tuple[int, int, int]] = []
    for dim, whole in enumerate(shape):
        start = offsets[dim] + (microbatch * covered[dim] if covered[dim] * pieces == whole else 0)
        if own[dim] != whole:
            ranges.append((dim, start, own[dim]))
    return tuple(ranges)


def _with_halos(
    shape: tuple[int, ...], ranges: tuple[tuple[int, int, int], ...], value: Value
) -> tuple[tuple[tuple[int, int, int], ...], tuple[tuple[int, int, int, float], ...]]:
    """Widen the ranges by the value's halos, as far as the whole tensor goes."""
    wide = {dim: (start, start + size) for dim, start, size in ranges}
    beyond: list[tuple[int, int, int, float]] = []
    for halo in value.halos:
        start, stop = wide[halo.dim]
        start, stop = start - halo.before, stop + halo.after
        inside = max(start, 0), min(stop, shape[halo.dim])
        wide[halo.dim] = inside
        if (start, stop) != inside:
            beyond.append((halo.dim, inside[0] - start, stop - inside[1], halo.fill))
    return tuple((dim, a, b - a) for dim, (a, b) in wide.items()), tuple(beyond)


@dataclass(frozen=True, slots=True)
class Needed:
    """What a rank needs of a batch of ``batch`` samples: ``rows``, ascending, and what to cut out of
    these alone. None: all, as samples are not simply the rows of every entry."""

    batch: int
    rows: tuple[int, ...] | None
    cuts: tuple[Cut, ...] = ()


@dataclass(frozen=True, slots=True)
class Part:
    """The needed samples of a planned batch, without the others."""

    batch: Batch


def needed(cuts: Sequence[Cut], captured: Captured) -> Needed:
    """Return which samples the cuts of a rank are made of."""
    firsts = {captured.graph.tensors[index].shape[:1] for index in captured.graph.inputs}
    size = sum(max(firsts, default=())) or 1
    is_asked = len(firsts) > 1 or captured.filled  # what is read off a batch is read off all of it
    if is_asked or any(one[0] == 0 for cut in cuts for one in cut.beyond):
        return Needed(size, None)
    spans = [_along_first(one, size) for one in cuts]
    rows = sorted(set[int]().union(*spans))
    narrowed = [
        _at(one, rows.index(span.start), len(span)) for one, span in zip(cuts, spans, strict=True)
    ]
    return Needed(size, tuple(rows), tuple(narrowed))


def _at(one: Cut, start: int, count: int) -> Cut:
    """Return a cut that begins elsewhere along the first dim."""
    return replace(one, ranges=((0, start, count), *(kept for kept in one.ranges if kept[0])))


def _along_first(one: Cut, size: int) -> range:
    """Return the rows of the whole tensor that a cut takes."""
    spans = (range(start, start + count) for dim, start, count in one.ranges if dim == 0)
    return next(spans, range(size))


@dataclass(frozen=True, slots=True)
class Shards:
    """This rank's shards of a batch, one for each cut, on its device and in nobody else's memory."""

    tensors: Sequence[Tensor]


def fill(
    store: Store,
    cuts: Sequence[Cut],
    batch: Batch | Shards,
    captured: Captured,
    at: int = 0,
) -> None:
    """Write the shards of a batch into the store; cuts them, and checks the batch, where that was not
    done. ``at``: the instance that the first microbatch's are for."""
    device = store.device
    if isinstance(batch, Shards):
        shards = batch.tensors
        if device.type == "cuda":  # made by another stream, which must not use their memory again
            for shard in shards:
                shard.record_stream(torch.cuda.current_stream(device))
    else:
        shards = cut(cuts, batch, captured, device)
    for place, shard in zip(cuts, shards, strict=True):
        store.data[store.slot(place.value, at + max(place.microbatch, 0))] = shard


def cut(
    cuts: Sequence[Cut],
    batch: Batch,
    captured: Captured,
    device: torch.device | None,
    rows: int | None = None,
) -> list[Tensor]:
    """Check a batch, or ``rows`` of one, and return its shards, on a device (None: where it is); they may be
    parts of it."""
    tensors = _checked(batch, captured, rows) if cuts else {}
    shards: list[Tensor] = []
    for one in cuts:
        tensor = tensors[one.name]
        for dim, start, size in one.ranges:
            tensor = tensor.narrow(dim, start, size)
        for dim, before, after, value in one.beyond:
            tensor = pad(tensor, dim, before, after, value)
        if tensor.dtype is not one.dtype or (device is not None and tensor.device != device):
            tensor = tensor.to(device=device, dtype=one.dtype, non_blocking=True)
        shards.append(tensor.contiguous())
    return shards


def named(batch: Batch | Tensor, names: Iterable[str]) -> Mapping[str, Tensor]:
    """Return a batch by the ``names`` of its entries; a tensor alone is the first of them."""
    given = cast(object, (batch,) if isinstance(batch, Tensor) else batch)
    if isinstance(given, Mapping):
        return cast(Mapping[str, Tensor], given)
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise InputError(
            f"a batch is a mapping of names to tensors, a sequence of tensors or a tensor, not {type(given).__name__}; "
            f"make one with the entries {list(names)} of it (collate_fn)"
        )
    return dict(zip(names, cast(Sequence[Tensor], given), strict=False))


def is_planned(batch: Mapping[str, Tensor], captured: Captured) -> bool:
    """Whether a batch has all entries, of the shapes that the plan was made for."""
    specs = [captured.graph.tensors[index] for index in captured.graph.inputs]
    shapes = {
        name: tuple(tensor.shape) for name, tensor in batch.items() if hasattr(tensor, "shape")
    }
    return all(shapes.get(spec.name) == spec.shape for spec in specs)


def other_size(batch: Mapping[str, Tensor], captured: Captured) -> int | None:
    """Return how many samples a batch has, where that is all in which it differs from the planned."""
    specs = [captured.graph.tensors[index] for index in captured.graph.inputs]
    shapes = [getattr(batch.get(spec.name), "shape", ()) for spec in specs]
    pairs = [(spec.shape, tuple(shape)) for spec, shape in zip(specs, shapes, strict=True)]
    changed = {(one[:1], two[:1]) for one, two in pairs if one != two}
    if len(changed) != 1:
        return None
    ((planned, given),) = changed
    alike = all(one[1:] == two[1:] for one, two in pairs)
    together = all(one != two for one, two in pairs if one[:1] == planned)
    return given[0] if planned and given and alike and together and given[0] > 0 else None


def check_size(batch: Batch | Shards, captured: Captured) -> None:
    """Raise InputError for a batch of another size where several are under way at once."""
    size = (
        None
        if isinstance(batch, Shards)
        else other_size(named(batch, captured.batch_names), captured)
    )
    if size is not None:
        specs = [captured.graph.tensors[index].shape for index in captured.graph.inputs]
        planned = max(shape[0] for shape in specs if shape)
        raise InputError(
            f"an asynchronous pipeline has several batches of {planned} samples under way at once, but "
            f"this one has {size}; leave it out (drop_last=True), or give it to evaluate"
        )


def _checked(batch: Batch, captured: Captured, rows: int | None) -> Mapping[str, Tensor]:
    batch = named(batch, captured.batch_names)
    for index in captured.graph.inputs:
        spec = captured.graph.tensors[index]
        tensor = batch.get(spec.name)
        if tensor is None:
            raise InputError(
                f"the batch must have the entries {list(captured.batch_names)}, but it has "
                f"{list(batch)}; {spec.name!r} is missing"
            )
        if not isinstance(cast(object, tensor), Tensor):
            raise InputError(
                f"batch entry {spec.name!r} must be a tensor, not {type(tensor).__name__}; make one of it (collate_fn)"
            )
        shape = spec.shape if rows is None else (rows, *spec.shape[1:])
        if tuple(tensor.shape) != shape:
            whose = "global shape" if rows is None else f"shape of {rows} samples,"
            raise InputError(
                f"batch entry {spec.name!r} must have the {whose} {shape} that the plan "
                f"was made for, not {tuple(tensor.shape)}; pass the global batch, or plan again "
                "(an executor of shardwright.build takes another number of samples, too)"
            )
        _check_dtype(spec.name, tensor.dtype, DTYPES[spec.dtype])
    for name, row in captured.fixed.items():
        _check_fixed(name, row, batch[name])
    for one in captured.filled:
        if not one.holds(batch):
            raise InputError(
                f"{one.rule}, as in the batch that the model was captured with, but some of this one is; fill it, or "
                "capture with a batch that has some, of which such modules run whole"
            )
    return batch


def _check_dtype(name: str, given: torch.dtype, planned: torch.dtype) -> None:
    """Raise InputError where values would be cut off: real numbers to integers, or complex ones to real."""
    if planned is not torch.bool and not torch.can_cast(given, planned):
        raise InputError(
            f"batch entry {name!r} must be {planned}, as the plan's model reads it, or of a dtype that converts to "
            f"it, not {given}; convert it where the batch is made"
        )


def _check_fixed(name: str, row: tuple[int, ...], tensor: Tensor) -> None:
    """Raise InputError where an entry says other sizes than those which the graph was made for."""
    others = [tuple(one) for one in tensor.tolist() if tuple(one) != row]
    if others:
        raise InputError(
            f"batch entry {name!r} must say {row} in every row, as the batch that the model was captured with: its "
            f"forward counts by these numbers; a row says {others[0]}; bring all samples to one size, or capture with a "
            "batch whose rows differ, of which such modules run whole"
        )
