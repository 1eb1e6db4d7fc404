"""Whole strategies by their usual names: data parallel, ZeRO, Megatron, sequence parallel, pipeline.

They are points of the space like any other. The search starts from them, the tests train them, and
users compare against them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from shardwright.core.graph import OperatorGraph
from shardwright.core.layout import Layout
from shardwright.core.schedules import SCHEDULES, ScheduleName
from shardwright.core.staleness import Staleness
from shardwright.core.strategy import (
    GradientSync,
    Mesh,
    OperatorConfig,
    ParameterConfig,
    Pipeline,
    Precision,
    Strategy,
)
from shardwright.operators.splitting.iteration import PLUS, Iteration
from shardwright.operators.splitting.samples import Samples, State, find_samples
from shardwright.planner.space.configs import choices, is_choice, wanted_as
from shardwright.planner.space.experts import expert_dims, inner_dims
from shardwright.planner.space.images import follow, spatial_dims
from shardwright.planner.space.megatron import megatron_dims
from shardwright.planner.space.rest import shard_further

Shape = tuple[int, ...]


class TooFewBlocks(ValueError):
    """A graph with fewer blocks than a pipeline has stages."""


# Sizes of buckets as torch's DistributedDataParallel has them.
FIRST_BUCKET_BYTES, BUCKET_BYTES = 2**20, 25 * 2**20

# Axes of a mesh, the last of which varies fastest, and those beside that of data which may split experts.
AXES = ("data", "group", "expert", "context", "height", "width", "tensor")
BesideData = tuple[Literal["context", "tensor"], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seed:
    """The degrees of a named strategy; their product is the number of devices.

    ``zero`` is the ZeRO stage 0-3; with ``keeps`` its third gathers parameters before forward and
    holds them until backward, as ZeRO-2 does, where PyTorch speaks of sharding gradients and optimizer
    (FSDP's SHARD_GRAD_OP). ``context`` shards the sequence dim everywhere, attention gathering
    keys and values (context parallelism); ``sequence`` only between the tensor-parallel regions.
    ``height`` and ``width`` split images (spatial parallelism) wherever their sizes allow; other
    operators split the samples instead where the batch divides, else they stay whole.
    ``expert`` splits experts, and all other operators' batch: data parallelism outside the experts. ``experts_over``
    are the axes of context and tensor parallelism that split the experts as well, instead of each of them inside
    (Megatron-Core's expert tensor parallelism of 1).
    ``recompute`` recomputes every repeated block.
    ``chunks``: every stage's devices hold so many parts of the model, as an interleaved pipeline has
    them: the k-th device set parts k, k + stages, ... On a V (two chunks) the second run goes back.
    ``group``: ZeRO shards over so many neighbours only, each group holding all of it; together they
    are ``data * group`` data-parallel devices (hybrid sharding).
    """

    data: int = 1
    tensor: int = 1
    stages: int = 1
    chunks: int = 1
    context: int = 1
    height: int = 1
    width: int = 1
    expert: int = 1
    experts_over: BesideData = ()
    zero: int = 0
    group: int = 1
    keeps: bool = False
    num_microbatches: int = 1
    schedule: ScheduleName = "1f1b"
    sequence: bool = False
    recompute: bool = False
    precision: Precision = "float32"
    staleness: Staleness = "none"

    @property
    def expert_pieces(self) -> int:
        """Over how many devices the experts of a layer lie."""
        over = {"context": self.context, "tensor": self.tensor}
        return self.expert * math.prod(over[axis] for axis in self.experts_over)

    @property
    def label(self) -> str:
        """The name people know it by."""
        copies = self.data * self.group
        within = f" in groups of {self.group}" if self.group > 1 else ""
        sizes = [size for size in (self.height, self.width) if size > 1 or self.height == 1]
        chunks = f" of {self.chunks} chunks" if self.chunks > 1 else ""
        order = self.schedule if self.staleness == "none" else f"asynchronous, {self.staleness}"
        said = (
            (copies > 1, f"data parallel x {copies}"),
            (self.zero, f"ZeRO-{self.zero}{within}"),
            (self.keeps, "no reshard after forward"),
            (self.context > 1, f"context parallel x {self.context}"),
            (self.height * self.width > 1, f"spatial parallel x {' x '.join(map(str, sizes))}"),
            (self.expert_pieces > 1, f"expert parallel x {self.expert_pieces}"),
            (self.tensor > 1, f"tensor parallel x {self.tensor}"),
            (self.sequence, "sequence parallel"),
            (self.stages > 1, f"{self.stages} stages{chunks} {order}"),
            (self.num_microbatches > 1, f"{self.num_microbatches} microbatches"),
            (self.recompute, "recomputation"),
        )
        return ", ".join(text for holds, text in said if holds) or "single device"


def seed_strategy(graph: OperatorGraph, seed: Seed, samples: Samples | None = None) -> Strategy:
    """Return the named strategy for a graph on devices 0, 1, 2, ...

    The tensor axis varies fastest, then width, height, context, expert, group, data and stage. Where a size does not divide, the operator
    or parameter stays replicated along that axis. Raises ValueError where the batch does not divide.
    """
    samples = samples or find_samples(graph)
    meshes = _meshes(seed)
    iterations = samples.iterations
    stage_of = balanced_stages(graph, seed.stages * seed.chunks)
    dims_of = _dims_by_axis(graph, seed, samples, iterations)
    configs: list[OperatorConfig] = []
    known: dict[object, OperatorConfig] = {}  # thousands of operators may be equal
    for index, iteration in enumerate(iterations):
        dims = tuple([dims_of[axis].get(index, "") for axis in meshes[0].axes])
        key = id(iteration), dims, samples.operator_dim[index], stage_of[index]
        if key not in known:
            cut = meshes[0].sizes, samples.operator_dim[index], seed.num_microbatches
            is_legal = is_choice(iteration, dims, *cut)
            chosen = dims if is_legal else _weaken(dims, choices(iteration, *cut))
            known[key] = OperatorConfig(mesh=stage_of[index], dims=chosen)
        configs.append(known[key])
    return Strategy(
        meshes=meshes,
        configs=tuple(configs),
        parameters=parameter_configs(graph, samples, configs, meshes[0], seed),
        pipeline=Pipeline(
            schedule=seed.schedule,
            num_microbatches=seed.num_microbatches,
            staleness=seed.staleness,
        ),
        gradient_sync=GradientSync(method="block", buckets=block_buckets(graph)),
        recompute=repeated_blocks(graph) if seed.recompute else (),
        precision=seed.precision,
        label=_label(seed, meshes[0], configs),
    )


def _dims_by_axis(
    graph: OperatorGraph, seed: Seed, samples: Samples, iterations: Sequence[Iteration]
) -> dict[str, dict[int, str]]:
    """Return what every axis of the mesh splits, by operator."""
    found = {"data": data_dims(graph, samples, iterations, seed.data * seed.group)}
    found["group"] = found["data"]
    if seed.context > 1:
        found["context"] = _context_parallel(graph, iterations, samples, seed.context)
    if seed.height * seed.width > 1:
        rest = _samples_or_nothing(iterations, found["data"], seed)
        for axis, pieces, place in (("height", seed.height, 2), ("width", seed.width, 3)):
            found[axis] = spatial_dims(graph, iterations, rest, pieces, place)
    split = seed.expert_pieces > 1 or seed.tensor > 1
    experts = expert_dims(graph, iterations, seed.expert_pieces) if split else {}
    if seed.expert > 1:
        found["expert"] = found["data"] | experts
    if seed.tensor > 1:
        found["tensor"] = megatron_dims(graph, iterations, samples, seed.tensor, seed.sequence)
        if "tensor" not in seed.experts_over:
            found["tensor"] |= inner_dims(graph, iterations, experts, seed.tensor)
    for axis in seed.experts_over:
        found[axis] |= experts
    return found


def _label(seed: Seed, mesh: Mesh, configs: Sequence[OperatorConfig]) -> str:
    """Return the usual name, where an axis splits nothing said to replicate."""
    label = seed.label
    used = {
        axis
        for config in configs
        for axis, name in zip(mesh.axes, config.dims, strict=True)
        if name
    }
    if not used & {"data", "group"}:
        label = label.replace("data parallel", "replicated")
    if "tensor" in used:
        return label
    return _said_once(label.replace("tensor parallel", "replicated"))


def _said_once(label: str) -> str:
    """Return a label in which what is replicated over several axes stands together."""
    words = label.split(", ")
    idle = [word for word in words if word.startswith("replicated x ")]
    if len(idle) < 2:
        return label
    whole = " ".join([idle[0], *(word.removeprefix("replicated ") for word in idle[1:])])
    return ", ".join([whole, *(one for one in words if one not in (*idle, "sequence parallel"))])


def _meshes(seed: Seed) -> tuple[Mesh, ...]:
    degrees: dict[str, int] = {axis: getattr(seed, axis) for axis in AXES}
    axes = tuple([axis for axis, degree in degrees.items() if degree > 1 or axis == "data"])
    sizes = tuple([degrees[axis] for axis in axes])
    width = math.prod(sizes)
    places = [*range(seed.stages)] * seed.chunks
    if SCHEDULES[seed.schedule].folds:
        places = [*range(seed.stages), *reversed(range(seed.stages))]
    return tuple(
        Mesh(axes=axes, sizes=sizes, devices=tuple(range(place * width, (place + 1) * width)))
        for place in places
    )


def _weaken(dims: tuple[str, ...], legal: tuple[tuple[str, ...], ...]) -> tuple[str, ...]:
    """Return the legal config that keeps most of the wanted one."""

    def agreement(other: tuple[str, ...]) -> int:
        if any(name not in ("", want) for name, want in zip(other, dims, strict=True)):
            return -1
        return sum(name == want for name, want in zip(other, dims, strict=True))

    return max(legal, key=agreement)


def repeated_blocks(graph: OperatorGraph) -> tuple[int, ...]:
    count = Counter(block.signature for block in graph.blocks)
    return tuple(i for i, block in enumerate(graph.blocks) if count[block.signature] > 1)


def block_buckets(graph: OperatorGraph) -> tuple[tuple[int, ...], ...]:
    """Group trainable parameters by the block that first reads them, last block first."""
    groups: dict[int, list[int]] = {}
    for tensor in graph.parameters:
        if graph.consumers[tensor] and graph.tensors[tensor].needs_gradient:
            groups.setdefault(graph.block_of[graph.consumers[tensor][0]], []).append(tensor)
    return tuple(tuple(groups[number]) for number in sorted(groups, reverse=True))


def capped_sync(graph: OperatorGraph) -> GradientSync:
    """Group trainable parameters as torch's DistributedDataParallel does: in the order in which
    backward makes them ready, until a bucket is full; the first is small, so that sending begins
    early."""
    found: list[tuple[int, ...]] = []
    bucket, held = list[int](), 0
    for block in block_buckets(graph):
        for tensor in reversed(block):
            bucket.append(tensor)
            held += graph.tensors[tensor].bytes
            if held >= (BUCKET_BYTES if found else FIRST_BUCKET_BYTES):
                found.append(tuple(bucket))
                bucket, held = [], 0
    if bucket:
        found.append(tuple(bucket))
    return GradientSync(method="capped", buckets=tuple(found))


def single_sync(graph: OperatorGraph) -> GradientSync:
    """Group all trainable parameters: gradients are sent when the last is ready."""
    bucket = tuple(tensor for block in block_buckets(graph) for tensor in block)
    return GradientSync(method="single", buckets=(bucket,))


def data_dim(graph: OperatorGraph, samples: Samples, iteration: Iteration, index: int) -> str:
    """Return the dim which data parallelism splits: samples, or sums over samples passing by."""
    if samples.operator_dim[index]:
        return samples.operator_dim[index]
    inputs = graph.operators[index].inputs
    sums = {i for i, tensor in enumerate(inputs) if samples.state[tensor] is State.SUM}
    outputs = graph.operators[index].outputs
    adds_up = all(samples.state[tensor] is State.SUM for tensor in outputs)
    return PLUS if adds_up and sums and sums >= set(iteration.linear) and iteration.linear else ""


def data_dims(
    graph: OperatorGraph, samples: Samples, iterations: Sequence[Iteration], pieces: int = 1
) -> dict[int, str]:
    """Return every operator's dim which data parallelism splits.

    Behind an operator that mixes samples (synchronised batch norm) microbatches are impossible, but
    an axis of the mesh may still split them.
    """
    plain = {i: data_dim(graph, samples, one, i) for i, one in enumerate(iterations)}
    if not samples.blocker:
        return plain
    lying = {tensor: 0 for tensor in graph.inputs if samples.tensor_dim[tensor] == 0}
    return follow(graph, iterations, plain, pieces, lying)


def balanced_stages(graph: OperatorGraph, stages: int) -> list[int]:
    """Cut the blocks into contiguous stages of about equal flops; one stage number per operator."""
    flops = [sum(op.flops for op in graph.operators[b.start : b.stop]) + 1.0 for b in graph.blocks]
    if len(flops) < stages:
        raise TooFewBlocks(
            f"a stage has one block at least, but {len(flops)} blocks cannot make {stages} stages; ask for fewer stages"
        )
    result: list[int] = []
    total, done, stage = sum(flops), 0.0, 0
    for number, block in enumerate(graph.blocks):
        middle = (done + flops[number] / 2) / total * stages
        left = len(flops) - number
        stage = min(max(stage, min(int(middle), stage + 1)), stages - 1)
        stage = max(stage, stages - left)
        if number == 0:
            stage = 0
        result += [stage] * (block.stop - block.start)
        done += flops[number]
    return result


def parameter_configs(
    graph: OperatorGraph,
    samples: Samples,
    configs: Sequence[OperatorConfig],
    mesh: Mesh,
    seed: Seed,
) -> tuple[ParameterConfig, ...]:
    """Return the layouts of all parameters, those that are alike once."""
    known: dict[tuple[Shape, Layout], ParameterConfig] = {}
    found: list[ParameterConfig] = []
    for tensor in graph.parameters:
        key = graph.tensors[tensor].shape, wanted_as(graph, samples, tensor, configs)
        if key not in known:
            known[key] = _parameter(*key, mesh, seed)
        found.append(known[key])
    return tuple(found)


def _parameter(shape: Shape, use: Layout, mesh: Mesh, seed: Seed) -> ParameterConfig:
    """Return a parameter's layouts: as its first use wants it, sharded further over data by ZeRO."""
    whole = ("tensor", "data") if seed.group > 1 else ("tensor",)
    further = tuple(axis for axis, name in enumerate(mesh.axes) if name not in whole)
    optimizer = shard_further(shape, use, mesh.sizes, further) if seed.zero else use
    return ParameterConfig(
        rest=optimizer if seed.zero == 3 else use,
        optimizer=optimizer,
        sync="microbatch" if seed.zero >= 2 else "step",
        keeps=seed.keeps and optimizer != use,
    )


def _samples_or_nothing(
    iterations: Sequence[Iteration], data: dict[int, str], seed: Seed
) -> dict[int, str]:
    """Return the data axis's dims where the batch divides into more pieces, else only its sums."""
    pieces = seed.data * seed.height * seed.width * seed.num_microbatches
    divides = all(
        iteration.dim(name).splits(pieces)
        for iteration, name in zip(iterations, data.values(), strict=True)
        if name not in ("", PLUS)
    )
    return {index: name if divides or name == PLUS else "" for index, name in data.items()}


def _context_parallel(
    graph: OperatorGraph, iterations: Sequence[Iteration], samples: Samples, pieces: int
) -> dict[int, str]:
    """Follow the sequence dim from the batch's tokens, or vectors of tokens, as far as it splits.

    Attention splits queries; its keys and values lack that dim and are gathered. The loss over
    tokens leaves partial sums, which pass on as those over samples do, where nothing else is added to them.
    """
    lying = {
        tensor: 1
        for tensor in graph.inputs
        for spec in (graph.tensors[tensor],)
        if len(spec.shape) == (3 if "float" in spec.dtype else 2)
    }
    passing = {
        index: PLUS if iteration.linear and not samples.operator_dim[index] else ""
        for index, iteration in enumerate(iterations)
    }
    return follow(graph, iterations, passing, pieces, lying)
