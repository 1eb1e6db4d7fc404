"""Named strategies that every answer is held against, and those that are asked for by name.

Data parallel, ZeRO, Megatron, spatial parallelism, pipelines, and tensor parallelism in two and three dimensions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property, partial
from typing import cast

from shardwright.core.layout import local_bytes, local_shape
from shardwright.core.legality import MOST_MICROBATCHES
from shardwright.core.schedules import NAMED, SCHEDULES, SEARCHED, NamedSchedule, refusal
from shardwright.core.staleness import ASYNCHRONOUS
from shardwright.core.strategy import Strategy
from shardwright.errors import InputError
from shardwright.planner.cost.recomputation import with_recomputation
from shardwright.planner.judge.actions import searched
from shardwright.planner.model.arrangements import global_batch
from shardwright.planner.model.context import Context
from shardwright.planner.schedule import order_of
from shardwright.planner.search.labels import named_grid, placed_by, with_wire
from shardwright.planner.search.namedlate import asynchronous
from shardwright.planner.search.seedplans import SEED_PLANS, SERVERS, check_linears, read_sizes
from shardwright.planner.search.served import served_plan
from shardwright.planner.space import Placement, check_strategy, place_modules
from shardwright.planner.space.configs import Pair
from shardwright.planner.space.experts import expert_dims
from shardwright.planner.space.grids import AXES, Grid, grid_strategy
from shardwright.planner.space.images import IMAGE_RANK
from shardwright.planner.space.seeds import Seed, seed_strategy


class Named:
    """A named strategy with as ``few`` microbatches as it may have, and, made once it is asked for,
    with as ``many``."""

    def __init__(self, few: Strategy, more: Callable[[], Strategy]) -> None:
        self.few = few
        self._more = more

    @cached_property
    def many(self) -> Strategy:
        """The strategy with the most microbatches."""
        return self._more()

    def __iter__(self) -> Iterator[Strategy]:
        yield self.few
        if self.many != self.few:
            yield self.many


def named_strategies(context: Context) -> Iterator[Named]:
    """Yield the named strategies that are legal here, plain data parallel first."""
    return _legal(context, _seeds(context))


def grid_strategies(context: Context) -> Iterator[Named]:
    """Yield 3-D, 2.5-D and 2-D tensor parallelism where all devices make such a grid."""
    grids = [_grid(context, name) for name in ("cube", "tesseract", "summa")]
    return _legal(context, [grid for grid in grids if grid is not None])


def asked_for(context: Context, wanted: str | Placement) -> Named:
    """Return the strategy of a placement, or that ``NAME`` or ``NAME:2x2x2`` names.

    Raises InputError where the name is unknown, or model, batch or devices do not divide.
    """
    if isinstance(wanted, Placement):
        placed = _placed(context, wanted)
        return Named(placed, lambda: placed)
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
        if name == SERVERS:
            served = served_plan(context, sizes, partial(as_strategy, context))
            return Named(served, lambda: served)
        named = _made_as_asked(context, name, sizes)
        check_strategy(context.graph, named.few, context.facts.samples)
    except ValueError as error:
        raise InputError(f"the seed plan {wanted} is impossible here: {error}") from error
    if name.startswith("megatron"):
        check_linears(name, named.few)
    return named


def _made_as_asked(context: Context, name: str, sizes: str) -> Named:
    if name not in SEARCHED:
        return _few_and_many(context, _seed_of(context, name, sizes), is_asked=True)
    halved = replace(_pipelined(context, name, sizes), schedule="zb-h1")
    made = searched(context, as_strategy(context, halved), name)
    return Named(made, lambda: made)


def _seed_of(context: Context, name: str, sizes: str) -> Seed | Grid:
    """Return what a known name, and perhaps sizes, stand for."""
    if name in ASYNCHRONOUS:
        return asynchronous(context, name, sizes)
    if name in NAMED:
        return _pipelined(context, name, sizes)
    return _sized(context, name, sizes) if sizes else _by_default(context, name)


def _placed(context: Context, placement: Placement) -> Strategy:
    count = context.cluster.num_devices
    highest = max(device for part in placement.parts for device in part.devices)
    if highest >= count:
        raise InputError(
            f"{placement.name} may name devices of the cluster, 0 to {count - 1}, but it names {highest}; name "
            "others, or plan for more devices"
        )
    try:
        made = _trained(context, place_modules(context.graph, placement, context.facts.samples))
        check_strategy(context.graph, made, context.facts.samples)
        order_of(made)
        return made
    except ValueError as error:
        raise InputError(f"{placement.name} is impossible here: {error}") from error


def least_seconds(context: Context, strategy: Strategy) -> float:
    """Bound a strategy of one stage from below: all operators on their shards, the update, and the
    activations' messages over the axes that carry most (those over others may overlap them).
    """
    sizes, pieces = strategy.meshes[0].sizes, strategy.pipeline.num_microbatches
    seen: set[tuple[object, ...]] = set()
    links: dict[tuple[int, ...], float] = {}
    weights = context.facts.folder.weights(strategy)
    total = _update(context, strategy, dict(weights))
    for index, times in weights:
        count = 1 if context.facts.is_once(index) else pieces
        total += (
            times * count * context.work_seconds(index, strategy.configs[index].dims, sizes, pieces)
        )
        for axes, cost in _carried(context, strategy, index, seen):
            links[axes] = links.get(axes, 0.0) + cost * pieces * times
    return total + max(links.values(), default=0.0)


def _carried(
    context: Context, strategy: Strategy, index: int, seen: set[tuple[object, ...]]
) -> Iterator[tuple[tuple[int, ...], float]]:
    """Yield the seconds of messages of what an operator reads, a microbatch, and over which axes, but for
    those ``seen`` before."""
    graph, mesh = context.graph, strategy.meshes[0]
    wires, pieces = context.prices.wires(mesh), strategy.pipeline.num_microbatches
    placed = context.facts.placements(index, strategy.configs[index].dims)
    for tensor, pair in zip(graph.operators[index].inputs, placed.inputs, strict=True):
        spec = graph.tensors[tensor]
        if spec.producer < 0 or not spec.needs_gradient:
            continue
        made = _made_as(context, strategy, tensor)
        shape = context.facts.shape(tensor, pieces)
        for key in (
            (tensor, "value", made.value, pair.value),
            (tensor, "gradient", pair.gradient, made.gradient),
        ):
            if key not in seen and wires.reshard(shape, spec.dtype, *key[2:]) < math.inf:
                yield from wires.by_axes(shape, spec.dtype, *key[2:])
            seen.add(key)
        halos = (tensor, pair.value, pair.halos)
        if pair.halos and halos not in seen:
            seen.add(halos)
            last, local = pair.halos[-1:], local_shape(shape, pair.value, mesh.sizes)
            yield last[0].axes, 2 * wires.halos(local, spec.dtype, last)


def _update(context: Context, strategy: Strategy, times: dict[int, int]) -> float:
    """Bound the seconds of adding gradients up, of the update, and of what follows it; by how many
    each operator stands for counts what it reads first."""
    wires, graph = context.prices.wires(strategy.meshes[0]), context.graph
    sizes, again = strategy.meshes[0].sizes, strategy.pipeline.num_microbatches - 1
    sorts = 2 ** sum(size > 1 for size in sizes) - 1  # of groups, whose messages may overlap
    total = 0.0
    for tensor, config in zip(graph.parameters, strategy.parameters, strict=True):
        spec, readers = graph.tensors[tensor], graph.consumers[tensor]
        count = times.get(readers[0], 0) if readers else 1
        if not spec.needs_gradient or not count:
            continue
        master = context.prices.master_dtype(spec.dtype)
        back = wires.reshard(spec.shape, master, config.optimizer, config.rest)
        total += count * back / max(sorts, 1)
        own = local_bytes(spec.shape, spec.dtype, config.optimizer, sizes)
        total += count * context.prices.update_seconds(own)
        if config.sync == "step":
            kept = local_bytes(spec.shape, spec.dtype, config.rest, sizes)
            total += count * again * context.prices.added_seconds(3 * kept)
    return total if total < math.inf else 0.0


def _made_as(context: Context, strategy: Strategy, tensor: int) -> Pair:
    """Return how the maker of a tensor lays it out."""
    maker = context.graph.tensors[tensor].producer
    position = context.graph.operators[maker].outputs.index(tensor)
    return context.facts.placements(maker, strategy.configs[maker].dims).outputs[position]


def _legal(context: Context, seeds: list[Seed] | list[Grid]) -> Iterator[Named]:
    for seed in seeds:
        try:
            yield _few_and_many(context, seed)
        except ValueError:
            continue


def _few_and_many(context: Context, seed: Seed | Grid, *, is_asked: bool = False) -> Named:
    if isinstance(seed, Seed) and seed.stages > 1 and is_asked:
        asked = as_strategy(context, seed)
        return Named(asked, lambda: asked)
    few, count = as_strategy(context, seed), _most(context, seed)
    more = replace(seed, num_microbatches=count)
    more = more if isinstance(more, Seed) else replace(more, keeps=False)
    return Named(few, lambda: few if more == seed else _or(few, context, more))


def _or(few: Strategy, context: Context, more: Seed | Grid) -> Strategy:
    """Return the strategy with more microbatches, or the one with few where it has no other."""
    try:
        return as_strategy(context, more)
    except ValueError:
        return few


def as_strategy(context: Context, seed: Seed | Grid) -> Strategy:
    """Return a named strategy as it trains here. Raises ValueError where it is impossible."""
    spread = context.facts.spreader.spread
    if isinstance(seed, Seed):
        return _trained(context, spread(lambda graph, own: seed_strategy(graph, seed, own)))
    made = spread(lambda graph, samples: grid_strategy(graph, seed, samples))
    return _trained(context, named_grid(context, made))


def _trained(context: Context, made: Strategy) -> Strategy:
    """Return a strategy as it trains here: precision, optimizer, clipping, statistics."""
    training = context.training
    if training.recompute != "auto":
        made = with_recomputation(context.graph, made, training.recompute)
    label = with_wire(made.label, context, placed_by(context, made))
    return replace(training.applied(made), label=label)


def _most(context: Context, seed: Seed | Grid) -> int:
    """Return the most microbatches worth planning: a power of two that divides each device's samples."""
    pieces = seed.data * seed.expert if isinstance(seed, Seed) else seed.row_pieces
    samples, common = global_batch(context) // pieces, context.facts.samples.common
    count = 1
    if samples and not context.facts.samples.blocker:
        most = math.gcd(samples, common)
        count = min(most & -most, MOST_MICROBATCHES)
    return max(count, seed.num_microbatches)


def _pipelined(context: Context, name: str, text: str) -> Seed:
    """Return a pipeline of a schedule, all devices that are not stages data parallel: with the sizes
    that were asked for, or up to four stages, two chunks and twice as many microbatches as stages."""
    count = context.num_devices
    if text:
        stages, *chunks, pieces = read_sizes(name, text)
        chunks = chunks or [2] * SCHEDULES[name].folds
    else:
        chunks = [2] * SCHEDULES[name].chunks
        stages = _stage_count(context, *chunks)
        samples, common = global_batch(context) // (count // stages), context.facts.samples.common
        most = math.gcd(samples, common) if samples else 1
        pieces = max(p for p in range(1, 2 * stages + 1) if most % p == 0)
    if stages < 2 or count % stages:
        raise InputError(
            f"a pipeline has at least 2 stages, a divisor of the {count} devices of the cluster, not "
            f"{stages}; name others: {name}:{SEED_PLANS[name]}"
        )
    samples = global_batch(context)
    if samples % (count // stages * pieces):
        raise InputError(
            f"each of {pieces} microbatches has as many samples for each of {count // stages} "
            f"data-parallel devices, but {samples} samples do not divide so; name fewer microbatches: "
            f"{name}:{SEED_PLANS[name]}"
        )
    return Seed(
        data=count // stages,
        stages=stages,
        chunks=chunks[0] if chunks else 1,
        num_microbatches=pieces,
        schedule=cast(NamedSchedule, name),
    )


def _sized(context: Context, name: str, text: str) -> Seed | Grid:
    """Return a named strategy with the sizes that were asked for."""
    sizes = read_sizes(name, text)
    needed, count = math.prod(sizes), context.num_devices
    if needed > count:
        raise InputError(
            f"{name} {text} needs {needed} devices, but the cluster has {count}; choose a smaller "
            "grid or a larger cluster"
        )
    return _made(name, sizes)


def _by_default(context: Context, name: str) -> Seed | Grid:
    """Return a named strategy on all devices."""
    count = context.num_devices
    if name.startswith("spatial"):
        return _spatial_by_default(context, name)
    if name not in AXES:
        width = _expert_width(context) if name == "expert" else tensor_width(context)
        if name == "expert" and width == 1 < count:
            raise InputError(
                "expert splits products that share a dim with their weights (experts), but the model "
                f"has none that {count} devices divide; choose another seed plan"
            )
        return _made(name, (count // width, width))
    grid = _grid(context, name)
    if grid is None:
        shape = {"summa": "q x q", "tesseract": "d x q x q", "cube": "q x q x q"}[name]
        raise InputError(
            f"{name} takes {shape} devices, q at least 2, but the cluster has {count}; choose a "
            f"cluster that has so many, or name a grid: {name}:{SEED_PLANS[name]}"
        )
    return grid


def _made(name: str, sizes: tuple[int, ...]) -> Seed | Grid:
    if name in AXES:
        return Grid(name=name, sizes=sizes, keeps=name == "cube")
    if name == "spatial":
        return Seed(data=sizes[0], height=sizes[1])
    if name == "spatial-2d":
        return Seed(data=sizes[0], height=sizes[1], width=sizes[2])
    if name == "expert":
        return Seed(data=sizes[0], expert=sizes[1])
    return Seed(data=sizes[0], tensor=sizes[1], sequence=name == "megatron-sequence")


def _spatial_by_default(context: Context, name: str) -> Seed:
    """Return spatial parallelism on all devices: of one image those that are near each other."""
    width = tensor_width(context)
    high, wide = width, 1
    if name == "spatial-2d":
        high = max(h for h in range(1, math.isqrt(width) + 1) if width % h == 0)
        wide = width // high
    return Seed(data=context.num_devices // width, height=high, width=wide)


def _has_images(context: Context) -> bool:
    tensors = [context.graph.tensors[index] for index in context.graph.inputs]
    return any(tensor.is_floating and len(tensor.shape) >= IMAGE_RANK for tensor in tensors)


def _slides(context: Context) -> bool:
    """Whether the model slides windows over images, so that splitting these is worth a thought."""
    return any(context.facts.iteration(root).windows for root in set(context.facts.ties.root))


def _grid(context: Context, name: str) -> Grid | None:
    """Return the grid of all devices: a square, a cube, or squares no more than they are wide."""
    count = context.num_devices
    for q in range(2, math.isqrt(count) + 1):
        depth, rest = divmod(count, q * q)
        wanted = {"summa": depth == 1, "tesseract": 1 < depth <= q, "cube": depth == q}[name]
        if rest == 0 and wanted:
            sizes = (q, q) if name == "summa" else (depth, q, q)
            return Grid(name=name, sizes=sizes, keeps=name == "cube")
    return None


def _data_seeds(count: int, batch: int) -> list[Seed]:
    """Return how a batch could be split over all devices, and its sequences where there are more."""
    if batch % count == 0:
        split = [Seed(data=count, zero=zero) for zero in range(4)]
        return [*split, Seed(data=count, zero=3, keeps=True)]
    return [Seed(data=batch, context=count // batch, zero=1)] if count % batch == 0 else []


def _seeds(context: Context) -> list[Seed]:
    count = context.num_devices
    if count == 1:
        return [Seed()]
    batch = global_batch(context)
    seeds = _data_seeds(count, batch)
    seeds += _split_seeds(context, batch)
    experts, stages = _expert_width(context), _stage_count(context)
    if experts > 1 and batch % count == 0:
        seeds.append(Seed(data=count // experts, expert=experts))
    if stages > 1 and not context.facts.samples.blocker and batch % (count // stages * stages) == 0:
        seeds.append(Seed(data=count // stages, stages=stages, num_microbatches=stages))
    return seeds


def _split_seeds(context: Context, batch: int) -> Iterator[Seed]:
    """Yield what splits layers, or images, besides samples."""
    count, near = context.num_devices, tensor_width(context)
    if near > 1 and batch % (count // near) == 0:
        yield Seed(data=count // near, tensor=near)
        yield Seed(data=count // near, tensor=near, zero=1, sequence=True)
    for width in sorted({near, count}) if _slides(context) else ():
        if width > 1 and batch % (count // width) == 0:
            yield Seed(data=count // width, height=width)


def tensor_width(context: Context) -> int:
    """Return how many devices of one host could share every operator: a divisor of both."""
    count = context.num_devices
    near = min(Counter(device.host for device in context.cluster.devices[:count]).values())
    near = near if near > 1 else count
    return max(w for w in range(1, min(near, 8) + 1) if count % w == 0)


def _expert_width(context: Context) -> int:
    """Return over how many devices the experts can lie: all, or the largest divisor that divides."""
    count = context.num_devices
    iterations = context.facts.samples.iterations
    if not expert_dims(context.graph, iterations, 1):
        return 1
    return max(
        width
        for width in range(1, count + 1)
        if count % width == 0 and (width == 1 or expert_dims(context.graph, iterations, width))
    )


def _stage_count(context: Context, chunks: int = 1) -> int:
    limit = max(1, min(4, len(context.facts.ties.ranges) // chunks))
    return max(s for s in range(1, limit + 1) if context.num_devices % s == 0)
