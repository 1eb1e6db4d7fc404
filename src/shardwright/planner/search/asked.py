"""Strategies that are asked for by name, and how their sizes are written; or by a file that places modules."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import cast

from shardwright.core.counts import read_count
from shardwright.core.legality import divisors
from shardwright.core.schedules import NAMED, SCHEDULES, SEARCHED, NamedSchedule, refusal
from shardwright.core.staleness import ACCUMULATES, ASYNCHRONOUS, Staleness
from shardwright.core.strategy import Strategy
from shardwright.errors import InputError
from shardwright.planner.judge.actions import searched
from shardwright.planner.model.arrangements import global_batch
from shardwright.planner.model.context import Context
from shardwright.planner.schedule import order_of
from shardwright.planner.search.named import (
    Named,
    as_strategy,
    expert_width,
    few_and_many,
    grid_of_all,
    stage_count,
    tensor_width,
    trained,
)
from shardwright.planner.space import Placement, check_strategy, place_modules
from shardwright.planner.space.grids import AXES, Grid
from shardwright.planner.space.images import IMAGE_RANK
from shardwright.planner.space.seeds import Seed
from shardwright.planner.space.servers import with_servers


def _asks_chunks(name: str) -> bool:
    """Whether a schedule takes any number of chunks: a V has two."""
    return SCHEDULES[name].chunks and not SCHEDULES[name].folds


SERVERS = "parameter-server"
# What may be asked for by name, and how its grid is written: by the degrees of a ``Seed``, or its devices.
SEED_PLANS = {
    "megatron": "DATAxTENSOR",
    "megatron-sequence": "DATAxTENSOR",
    "expert": "DATAxEXPERT",
    SERVERS: "WORKERSxSERVERS",
    "summa": "ROWSxCOLUMNS",
    "tesseract": "DEPTHxROWSxCOLUMNS",
    "cube": "IxJxL",
    "spatial": "DATAxHEIGHT",
    "spatial-2d": "DATAxHEIGHTxWIDTH",
    **{
        name: "STAGESxCHUNKSxMICROBATCHES" if _asks_chunks(name) else "STAGESxMICROBATCHES"
        for name in NAMED
    },
    **dict.fromkeys(SEARCHED, "STAGESxMICROBATCHES"),
    **dict.fromkeys(ASYNCHRONOUS, "STAGES[xTENSOR]"),
    **dict.fromkeys(sorted(ACCUMULATES), "STAGESxMICROBATCHES[xTENSOR]"),
}


def asked_for(context: Context, wanted: str | Placement) -> Named:
    """Return the strategy of a placement, or that ``NAME`` or ``NAME:2x2x2`` names.

    Raises InputError where the name is unknown, or model, batch or devices do not divide.
    """
    if isinstance(wanted, Placement):
        return Named(_placed(context, wanted))
    name, _, sizes = wanted.partition(":")
    if name not in SEED_PLANS:
        known = ", ".join(f"{known}[:{form}]" for known, form in SEED_PLANS.items())
        unknown = f"a seed plan must be one of {known}, not {wanted[:40]!r}; choose one"
        raise InputError(refusal(name) or unknown)
    if name.startswith("spatial") and not _has_images(context):
        raise InputError(
            f"{name} splits the height of images (samples x channels x height x width), but none of "
            "the batch's tensors has such dims; choose another seed plan"
        )
    try:
        named = _made(context, name, sizes)
        check_strategy(context.graph, named.few, context.facts.samples)
    except ValueError as error:
        raise InputError(f"the seed plan {wanted} is impossible here: {error}") from error
    if name.startswith("megatron") and not uses(named.few, "tensor"):
        mesh = named.few.meshes[0]
        raise InputError(
            f"{name} splits linear layers whose results can stay split until the next one, but the model has "
            f"none that {mesh.sizes[mesh.axes.index('tensor')]} devices divide; choose another seed plan"
        )
    return named


def read_sizes(name: str, text: str) -> tuple[int, ...]:
    """Read the sizes of a named strategy; what is in brackets may be left out. Raises InputError where they are
    written otherwise."""
    parts, form = text.split("x"), SEED_PLANS[name]
    most = form.count("x") + 1
    sizes = tuple(read_count(part, 10**6) for part in parts)
    if not most - form.count("[") <= len(parts) <= most or 0 in sizes:
        shown = "x".join("2" * most)
        raise InputError(
            f"the sizes of {name} are written {form}, such as {shown}, not {text[:40]!r}; write so"
        )
    return sizes


def uses(strategy: Strategy, axis: str) -> bool:
    """Whether an axis of more than one device, if there is one, splits anything."""
    mesh = strategy.meshes[0]
    if axis not in mesh.axes or mesh.sizes[mesh.axes.index(axis)] == 1:
        return True
    return any(config.dims[mesh.axes.index(axis)] for config in strategy.configs)


def _placed(context: Context, placement: Placement) -> Strategy:
    count = context.cluster.num_devices
    highest = max(device for part in placement.parts for device in part.devices)
    if highest >= count:
        raise InputError(
            f"{placement.name} may name devices of the cluster, 0 to {count - 1}, but it names {highest}; name "
            "others, or plan for more devices"
        )
    try:
        made = trained(context, place_modules(context.graph, placement, context.facts.samples))
        check_strategy(context.graph, made, context.facts.samples)
        order_of(made)
        return made
    except ValueError as error:
        raise InputError(f"{placement.name} is impossible here: {error}") from error


def _has_images(context: Context) -> bool:
    tensors = [context.graph.tensors[index] for index in context.graph.inputs]
    return any(tensor.is_floating and len(tensor.shape) >= IMAGE_RANK for tensor in tensors)


def _made(context: Context, name: str, text: str) -> Named:
    """Return what a known name, and perhaps sizes, stand for. A pipeline has the microbatches that it has."""
    if name == SERVERS:
        return Named(_served(context, text))
    if name in SEARCHED:
        halved = replace(_pipelined(context, name, text), schedule="zb-h1")
        return Named(searched(context, as_strategy(context, halved), name))
    if name in ASYNCHRONOUS:
        return Named(as_strategy(context, _asynchronous(context, name, text)))
    if name in NAMED:
        return Named(as_strategy(context, _pipelined(context, name, text)))
    return few_and_many(context, _divided(context, name, text))


def _divided(context: Context, name: str, text: str) -> Seed | Grid:
    """Return one stage of the sizes that were asked for, or of all devices."""
    sizes, count = (
        read_sizes(name, text) if text else _sizes_of_all(context, name),
        context.num_devices,
    )
    if (needed := math.prod(sizes)) > count:
        raise InputError(
            f"{name} {text} needs {needed} devices, but the cluster has {count}; choose a smaller "
            "grid or a larger cluster"
        )
    if name in AXES:
        return Grid(name=name, sizes=sizes, keeps=name == "cube")
    degrees = [degree.lower() for degree in SEED_PLANS[name].split("x")]
    made = Seed(sequence=name == "megatron-sequence")
    return replace(made, **dict(zip(degrees, sizes, strict=True)))


def _sizes_of_all(context: Context, name: str) -> tuple[int, ...]:
    """Return sizes that take all devices; of one layer, or one image, those that are near each other."""
    count = context.num_devices
    if name in AXES:
        grid = grid_of_all(context, name)
        if grid is None:
            shape = {"summa": "q x q", "tesseract": "d x q x q", "cube": "q x q x q"}[name]
            raise InputError(
                f"{name} takes {shape} devices, q at least 2, but the cluster has {count}; choose a "
                f"cluster that has so many, or name a grid: {name}:{SEED_PLANS[name]}"
            )
        return grid.sizes
    width = expert_width(context) if name == "expert" else tensor_width(context)
    if name == "expert" and width == 1 < count:
        raise InputError(
            "expert splits products that share a dim with their weights (experts), but the model "
            f"has none that {count} devices divide; choose another seed plan"
        )
    if name == "spatial-2d":
        high = divisors(width, math.isqrt(width))[-1]
        return count // width, high, width // high
    return count // width, width


def _pipelined(context: Context, name: str, text: str) -> Seed:
    """Return a pipeline of a schedule, all devices that are not stages data parallel: with the sizes
    that were asked for, or up to four stages, two chunks and twice as many microbatches as stages."""
    count = context.num_devices
    if text:
        stages, *chunks, pieces = read_sizes(name, text)
        chunks = chunks or [2] * SCHEDULES[name].folds
    else:
        chunks = [2] * SCHEDULES[name].chunks
        stages = stage_count(context, *chunks)
        samples, common = global_batch(context) // (count // stages), context.facts.samples.common
        most = math.gcd(samples, common) if samples else 1
        pieces = divisors(most, 2 * stages)[-1]
    if stages < 2 or count % stages:
        raise InputError(
            f"a pipeline has at least 2 stages, a divisor of the {count} devices of the cluster, not "
            f"{stages}; name others: {name}:{SEED_PLANS[name]}"
        )
    _check_pieces(context, name, pieces, count // stages)
    return Seed(
        data=count // stages,
        stages=stages,
        chunks=chunks[0] if chunks else 1,
        num_microbatches=pieces,
        schedule=cast(NamedSchedule, name),
    )


def _asynchronous(context: Context, name: str, text: str) -> Seed:
    """Return a pipeline that is never flushed: every device a stage, or as many stages as are asked for, of
    data-parallel devices, or groups of tensor-parallel ones; and where it has microbatches, the fewest that it may have."""
    count, samples = context.num_devices, global_batch(context)
    stages, *sizes = read_sizes(name, text) if text else (count,)
    asked = sizes[:1] if name in ACCUMULATES else [1]
    within = math.prod(sizes[name in ACCUMULATES :])
    copies = count // (stages * within)
    if stages < 2 or stages * within * copies != count or samples % max(copies, 1):
        raise InputError(
            "an asynchronous pipeline has at least 2 stages of equally many devices, each with as many "
            f"samples, but {name} asks for {stages} stages with {within} devices for each of their samples, of "
            f"the cluster's {count}, and {samples} samples; name others: {name}:{SEED_PLANS[name]}"
        )
    # The fewest that are as many as stages.
    enough = [pieces for pieces in divisors(samples // copies) if pieces >= stages]
    pieces = (asked or enough or [stages])[0]
    _check_pieces(context, name, pieces, copies)
    mode = cast(Staleness, name)
    return Seed(data=copies, tensor=within, stages=stages, num_microbatches=pieces, staleness=mode)


def _check_pieces(context: Context, name: str, pieces: int, copies: int) -> None:
    samples = global_batch(context)
    if samples % (copies * pieces):
        raise InputError(
            f"each of {pieces} microbatches has as many samples for each of {copies} "
            f"data-parallel devices, but {samples} samples do not divide so; name fewer microbatches: "
            f"{name}:{SEED_PLANS[name]}"
        )


def _served(context: Context, text: str) -> Strategy:
    """Return data parallelism over so many workers with so many servers: the first devices of the cluster, and
    the workers those behind; where there are not so many, servers lie on workers' devices, evenly between
    them. Without sizes every device is both.

    Raises InputError where devices or batch do not suffice.
    """
    count, samples = context.num_devices, global_batch(context)
    workers, servers = read_sizes(SERVERS, text) if text else (count, count)
    if max(workers, servers) > count or samples % workers:
        raise InputError(
            "parameter servers, and workers with as many samples each, are devices of the cluster, but "
            f"{workers} workers and {servers} servers are asked for, and there are {count} devices and "
            f"{samples} samples; name others: {SERVERS}:{SEED_PLANS[SERVERS]}"
        )
    made = as_strategy(context, Seed(data=workers))
    if workers + servers <= count:
        return with_servers(made, tuple(range(servers)), tuple(range(servers, servers + workers)))
    most = max(workers, servers)
    spread = tuple([number * most // servers for number in range(servers)])
    return with_servers(made, spread, tuple(range(workers)))
