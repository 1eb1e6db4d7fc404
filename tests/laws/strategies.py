"""Random legal strategies: any split of any operator, any layout of any parameter.

``Shape`` says what a strategy looks like from afar and is what hypothesis draws and shrinks;
``random_strategy`` fills in everything else from its seed.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from functools import cache
from random import Random
from typing import Any

from hypothesis import strategies as st

from shardwright.core.graph import OperatorGraph
from shardwright.core.layout import FLAT, PARTIAL, REPLICATE, Layout, local_shape
from shardwright.core.schedules import NAMED, SCHEDULES, ScheduleName
from shardwright.core.strategy import (
    GradientSync,
    Mesh,
    OperatorConfig,
    ParameterConfig,
    Pipeline,
    Strategy,
    WireDtype,
)
from shardwright.operators.splitting import iterate
from shardwright.operators.splitting.iteration import PLUS, Iteration
from shardwright.operators.splitting.samples import Samples
from shardwright.planner.schedule.pipeline import Action, Phase, needs
from shardwright.planner.space.configs import choices, placements, wanted_as
from shardwright.planner.space.rest import shard_further
from shardwright.planner.space.seeds import data_dim

AXES = ("x", "y", "z")
MESHES = ((1,), (2,), (4,), (8,), (2, 2), (4, 2), (2, 4), (2, 2, 2), (3,), (6,), (3, 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A strategy from afar. ``wildness`` is the share of operators and parameters whose split or
    layout is drawn at random; the others are data parallel along the first axis. ``recomputes`` whole
    blocks; ``drops`` results of single operators and copies in other layouts. ``shuffles``: the
    devices of the meshes are in any order. ``cuts_blocks``: stages may begin inside a block.
    ``chunks``: an interleaved pipeline, or one in an order of its own, returns to its devices so
    often. ``streams``: every batch is fetched while the step before computes."""

    sizes: tuple[int, ...]
    stages: int = 1
    chunks: int = 1
    num_microbatches: int = 1
    schedule: ScheduleName = "1f1b"
    wildness: float = 0.0
    recomputes: bool = False
    drops: bool = False
    clips: bool = False
    shuffles: bool = False
    cuts_blocks: bool = False
    streams: bool = False
    seed: int = 0

    @property
    def num_ranks(self) -> int:
        """How many ranks it takes."""
        return math.prod(self.sizes) * self.stages


def shapes(least_ranks: int = 2, most_ranks: int = 8) -> st.SearchStrategy[Shape]:
    """Draw shapes over ``least_ranks`` to ``most_ranks`` ranks."""
    grids = [
        (sizes, stages)
        for sizes in MESHES
        for stages in (1, 2, 3, 4)
        if least_ranks <= math.prod(sizes) * stages <= most_ranks
    ]
    return st.builds(
        _shape,
        grid=st.sampled_from(grids),
        num_microbatches=st.sampled_from((1, 2, 4)),
        schedule=st.sampled_from((*NAMED, "custom")),
        chunks=st.sampled_from((1, 2, 3)),
        wildness=st.sampled_from((0.0, 0.1, 0.5, 1.0)),
        recomputes=st.booleans(),
        drops=st.booleans(),
        clips=st.booleans(),
        shuffles=st.booleans(),
        cuts_blocks=st.booleans(),
        streams=st.booleans(),
        seed=st.integers(0, 2**32),
    )


def _shape(grid: tuple[tuple[int, ...], int], **rest: Any) -> Shape:
    if not SCHEDULES[rest["schedule"]].chunks:
        rest["chunks"] = 1
    return Shape(sizes=grid[0], stages=grid[1], **rest)


def random_strategy(graph: OperatorGraph, samples: Samples, shape: Shape) -> Strategy:
    """Return the strategy of a shape, legal for the graph."""
    random = Random(shape.seed)
    iterations = [iterate(graph, index) for index in range(len(graph.operators))]
    stages = min(shape.stages * shape.chunks, len(graph.blocks))
    if SCHEDULES[shape.schedule].folds:
        stages = 2 * min(shape.stages, len(graph.blocks) // 2)
    meshes = _meshes(shape, stages, random)
    pieces = 1 if samples.blocker else shape.num_microbatches
    stage_of = _stages(graph, stages, shape, random)
    configs = _configs(graph, samples, iterations, stage_of, pieces, shape, random)
    parameters = tuple(
        _parameter(
            graph, tensor, wanted_as(graph, samples, tensor, configs), meshes[0], shape, random
        )
        for tensor in graph.parameters
    )
    if pieces == 1 or (stages == 1 and shape.schedule == "1f1b"):
        parameters = tuple(replace(one, keeps=random.random() < 0.3) for one in parameters)
    blocks = range(len(graph.blocks))
    starting = random.choice((0.0, 0.0, 0.2, 1.0))
    return Strategy(
        meshes=meshes,
        configs=tuple(configs),
        parameters=parameters,
        pipeline=Pipeline(
            schedule=shape.schedule,
            num_microbatches=pieces,
            order=own_order(meshes, pieces, random) if shape.schedule == "custom" else (),
        ),
        gradient_sync=GradientSync(buckets=_buckets(graph, random)),
        recompute=tuple(b for b in blocks if shape.recomputes and random.random() < 0.5),
        recompute_operators=_some(len(graph.operators), shape, random),
        reshard_again=_some(len(graph.tensors), shape, random),
        segment_starts=tuple(
            index for index in range(len(graph.operators)) if random.random() < starting
        ),
        clips=shape.clips,
        updates="ready" if not shape.clips and random.random() < 0.4 else "step",
    )


def with_wire(strategy: Strategy, seed: int, *dtypes: WireDtype) -> Strategy:
    """Return a strategy with gradients in one of some dtypes on the wire, some with error feedback, or as
    they are."""
    random = Random(seed)
    dtype = random.choice(("parameter", *dtypes))
    feeds_back = dtype != "parameter" and random.random() < 0.5
    sync = replace(strategy.gradient_sync, dtype=dtype, error_feedback=feeds_back)
    return replace(strategy, gradient_sync=sync)


def _some(count: int, shape: Shape, random: Random) -> tuple[int, ...]:
    """Draw which operators, or tensors, are made again in backward: few, some or all."""
    share = random.choice((0.1, 0.5, 1.0))
    return tuple(index for index in range(count) if shape.drops and random.random() < share)


def _meshes(shape: Shape, stages: int, random: Random) -> tuple[Mesh, ...]:
    width, folds = math.prod(shape.sizes), SCHEDULES[shape.schedule].folds
    crews = stages // 2 if folds else min(stages, shape.stages)
    devices = list(range(width * crews))
    if shape.shuffles:
        random.shuffle(devices)
    return tuple(
        Mesh(
            axes=AXES[: len(shape.sizes)],
            sizes=shape.sizes,
            devices=tuple(devices[crew * width : (crew + 1) * width]),
        )
        for crew in (min(s, stages - 1 - s) if folds else s % crews for s in range(stages))
    )


def own_order(meshes: tuple[Mesh, ...], pieces: int, random: Random) -> tuple[str, ...]:
    """Write a random order: whatever may come next, until all has come.

    The microbatches' forwards come in one random order on all meshes, and their backwards in another;
    some are split, and then W comes when it will.
    """
    phases: tuple[Phase, ...] = ("F", "B")
    sequences = {phase: random.sample(range(pieces), pieces) for phase in phases}
    share = random.choice((0.0, 0.5, 1.0))
    crew_of = {number: frozenset(mesh.devices) for number, mesh in enumerate(meshes)}
    lines: dict[frozenset[int], list[str]] = {crew: [] for crew in crew_of.values()}
    waiting = {(mesh, phase): list(sequences[phase]) for mesh in crew_of for phase in phases}
    done = set[Action]()
    while waiting:
        following = [Action(mesh, phase, left[0]) for (mesh, phase), left in waiting.items()]
        ready = [one for one in following if done.issuperset(needs(one, len(meshes)))]
        action = random.choice(ready)
        done.add(action)
        key = (action.mesh, action.phase)
        if action.phase == "B" and random.random() < share:
            waiting.setdefault((action.mesh, "W"), []).append(action.microbatch)
            action = action._replace(phase="I")
        lines[crew_of[action.mesh]].append(str(action))
        waiting[key].pop(0)
        if not waiting[key]:
            del waiting[key]
    return tuple(" ".join(line) for line in lines.values())


def _stages(graph: OperatorGraph, stages: int, shape: Shape, random: Random) -> list[int]:
    """Cut between blocks or, where ``cuts_blocks``, between any two operators."""
    places = [block.start for block in graph.blocks[1:]]
    if shape.cuts_blocks:
        places = list(range(1, len(graph.operators)))
    cuts = random.sample(places, stages - 1)
    return [sum(index >= cut for cut in cuts) for index in range(len(graph.operators))]


def _configs(
    graph: OperatorGraph,
    samples: Samples,
    iterations: list[Iteration],
    stage_of: list[int],
    pieces: int,
    shape: Shape,
    random: Random,
) -> list[OperatorConfig]:
    """Choose operator by operator, in order.

    Partial sums pass through an operator (the pseudo dim "+") only where they arrive: nothing turns
    another layout into partial sums, and what goes to another stage is summed before.
    """
    held: dict[tuple[int, int], Layout] = {}
    configs: list[OperatorConfig] = []
    for index, (operator, iteration) in enumerate(zip(graph.operators, iterations, strict=True)):
        stage = stage_of[index]
        linear = [held.get((operator.inputs[place], stage), ()) for place in iteration.linear]

        def is_legal(dims: tuple[str, ...], arriving: list[Layout] = linear) -> bool:
            return all(
                layout and layout[axis] == PARTIAL
                for axis, name in enumerate(dims)
                if name == PLUS
                for layout in arriving
            )

        every = choices(iteration, shape.sizes, samples.operator_dim[index], pieces)
        legal = [dims for dims in every if is_legal(dims)]
        usual = (data_dim(graph, samples, iteration, index), *[""] * (len(shape.sizes) - 1))
        chosen = usual if usual in legal else legal[0]
        if random.random() < shape.wildness:
            chosen = random.choice(legal)
        configs.append(OperatorConfig(mesh=stage, dims=chosen))
        for tensor, pair in zip(
            operator.outputs, placements(iteration, chosen).outputs, strict=True
        ):
            held[tensor, stage] = pair.value
    return configs


def _parameter(
    graph: OperatorGraph, tensor: int, use: Layout, mesh: Mesh, shape: Shape, random: Random
) -> ParameterConfig:
    size = graph.tensors[tensor].shape
    if random.random() < shape.wildness:
        options = layouts(size, mesh.sizes)
        rest, optimizer = random.choice((use, random.choice(options))), random.choice(options)
    else:
        finer = shard_further(size, use, mesh.sizes)
        rest, optimizer = random.choice(((use, use), (use, finer), (finer, finer)))
    sync = random.choice(("step", "microbatch"))
    return ParameterConfig(rest=rest, optimizer=optimizer, sync=sync)


@cache
def layouts(shape: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[Layout, ...]:
    """Return every layout of a parameter on a mesh: each axis shards a dim or none, or cuts flat
    shards."""
    found: list[Layout] = []
    placements = (*range(REPLICATE, len(shape)), FLAT)
    for layout in itertools.product(placements, repeat=len(sizes)):
        try:
            local_shape(shape, layout, sizes)
        except ValueError:
            continue
        found.append(layout)
    return tuple(found)


def _buckets(graph: OperatorGraph, random: Random) -> tuple[tuple[int, ...], ...]:
    """Merge neighbouring gradients at random, the last parameter first; some travel alone."""
    buckets: list[list[int]] = [[]]
    for tensor in reversed(graph.parameters):
        if not graph.tensors[tensor].needs_gradient or not graph.consumers[tensor]:
            continue
        if random.random() < 0.3:
            buckets.append([])
        if random.random() < 0.9:
            buckets[-1].append(tensor)
    return tuple(tuple(bucket) for bucket in buckets if bucket)
