"""Named strategies that every answer is held against.

Data parallel, ZeRO, Megatron, spatial parallelism, pipelines, and tensor parallelism in two and three dimensions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cached_property

from shardwright.core.layout import local_bytes, local_shape
from shardwright.core.legality import MOST_MICROBATCHES, divisors
from shardwright.core.strategy import Strategy
from shardwright.planner.cost.recomputation import with_recomputation
from shardwright.planner.model.arrangements import global_batch
from shardwright.planner.model.context import Context
from shardwright.planner.search.labels import named_grid, placed_by, with_wire
from shardwright.planner.space.configs import Pair
from shardwright.planner.space.experts import expert_dims
from shardwright.planner.space.grids import Grid, grid_strategy
from shardwright.planner.space.seeds import Seed, seed_strategy


class Named:
    """A named strategy with as ``few`` microbatches as it may have, and, made once it is asked for,
    with as ``many``."""

    def __init__(self, few: Strategy, more: Callable[[], Strategy] | None = None) -> None:
        self.few = few
        self._more = more

    @cached_property
    def many(self) -> Strategy:
        """The strategy with the most microbatches."""
        return self._more() if self._more else self.few

    def __iter__(self) -> Iterator[Strategy]:
        yield self.few
        if self.many != self.few:
            yield self.many


def named_strategies(context: Context) -> Iterator[Named]:
    """Yield the named strategies that are legal here, plain data parallel first."""
    return _legal(context, _seeds(context))


def grid_strategies(context: Context) -> Iterator[Named]:
    """Yield 3-D, 2.5-D and 2-D tensor parallelism where all devices make such a grid."""
    grids = [grid_of_all(context, name) for name in ("cube", "tesseract", "summa")]
    return _legal(context, filter(None, grids))


def least_seconds(context: Context, strategy: Strategy) -> float:
    """Bound a strategy from below: all operators on their shards, the update, and the activations' messages over
    the axes that carry most (those over others may overlap them); a pipeline as if all work divided evenly.
    """
    mesh, *others = strategy.meshes
    if others:
        return context.prices.least_serial_seconds / len(strategy.devices)
    sizes, pieces = mesh.sizes, strategy.pipeline.num_microbatches
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


def _legal(context: Context, seeds: Iterable[Seed | Grid]) -> Iterator[Named]:
    for seed in seeds:
        with suppress(ValueError):
            yield few_and_many(context, seed)


def few_and_many(context: Context, seed: Seed | Grid) -> Named:
    """Return a named strategy, with as many microbatches as are worth planning where it may have these."""
    few = as_strategy(context, seed)
    more = replace(seed, num_microbatches=_most(context, seed))
    more = more if isinstance(more, Seed) else replace(more, keeps=False)

    def many() -> Strategy:
        try:
            return few if more == seed else as_strategy(context, more)
        except ValueError:
            return few

    return Named(few, many)


def as_strategy(context: Context, seed: Seed | Grid) -> Strategy:
    """Return a named strategy as it trains here. Raises ValueError where it is impossible."""
    spread = context.facts.spreader.spread
    if isinstance(seed, Seed):
        return trained(context, spread(lambda graph, own: seed_strategy(graph, seed, own)))
    made = spread(lambda graph, samples: grid_strategy(graph, seed, samples))
    return trained(context, named_grid(context, made))


def trained(context: Context, made: Strategy) -> Strategy:
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


def _slides(context: Context) -> bool:
    """Whether the model slides windows over images, so that splitting these is worth a thought."""
    return any(context.facts.iteration(root).windows for root in set(context.facts.ties.root))


def grid_of_all(context: Context, name: str) -> Grid | None:
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
    experts, stages = expert_width(context), stage_count(context)
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
    return divisors(count, min(near, 8))[-1]


def expert_width(context: Context) -> int:
    """Return over how many devices the experts can lie: all, or the largest divisor that divides."""
    count = context.num_devices
    iterations = context.facts.samples.iterations
    if not expert_dims(context.graph, iterations, 1):
        return 1
    widths = divisors(count, count)
    return max(w for w in widths if w == 1 or expert_dims(context.graph, iterations, w))


def stage_count(context: Context, chunks: int = 1) -> int:
    """Return how many stages a pipeline has if nobody says: a divisor of the devices, four at most."""
    most = max(1, min(4, len(context.facts.ties.ranges) // chunks))
    return divisors(context.num_devices, most)[-1]
