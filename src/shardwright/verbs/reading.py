"""How a published run's peak memory was read, and the same reading of its prediction.

Three things are read: what tensors take (``torch.cuda.max_memory_allocated``), what PyTorch's
allocator reserves for them (``max_memory_reserved``), and what the driver sees (``nvidia-smi``:
context, kernels and NCCL's buffers too). Whether a run fits is a matter of the last.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from shardwright.core.strategy import Strategy
from shardwright.device import Surroundings, surroundings
from shardwright.files.runs import PublishedRun
from shardwright.planner.lower import lower
from shardwright.planner.search import Context
from shardwright.verbs.dimensions import is_titan, mentions

Kind = Literal["allocated", "reserved", "device"]

# DeepSpeed's ``reduce_bucket_size``, whose gradients of 16 bits are put together before they are sent.
BUCKET_BYTES = 2 * 500_000_000
# A device whose tensors take less of it is not full, however its allocator does.
FULL = 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """``kind`` is what was read, ``where`` on which stages; ``buffers`` are bytes that the framework
    holds besides, ``streams``: communication has memory of its own (``device.replay``).
    ``keeps_scores``: the last stage still has the scores of the microbatch before; ``copies_scores``:
    it has them once more than its kernels account for."""

    kind: Kind = "allocated"
    where: Literal["fullest", "last", "first host"] = "fullest"
    buffers: int = 0
    streams: bool = False
    keeps_scores: bool = False
    copies_scores: bool = False
    software_date: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """The bytes that would be read, and whether the run would fit."""

    bytes: float
    fits: bool


def reading_of(run: PublishedRun, loss: str) -> Reading:
    """Return how the memory of a run with a kernel of cross entropy was read; ``nvidia-smi`` shows the
    host that it is run on."""
    text, framework, sharding = run.mem_kind.lower(), run.framework.lower(), run.sharding.lower()
    is_smi = mentions(text, ("smi", "driver", "device"))
    kind: Kind = "reserved" if "reserved" in text or "cached" in text else "allocated"
    buckets = "deepspeed" in framework and re.search(r"zero[- ]?[12]", sharding)
    where = "last" if "last" in text else "fullest"
    if is_smi and not mentions(text, ("max", "worst", "full")):
        where = "first host"
    return Reading(
        kind="device" if is_smi else kind,
        where=where,
        buffers=BUCKET_BYTES if buckets else 0,
        streams="fsdp" in sharding,
        # Its PipelineEngine has two buffers of outputs on the last stage, each kept until its next use.
        keeps_scores="deepspeed" in framework and "megatron" in framework,
        copies_scores=_copies_scores(run, loss),
        software_date=run.software_date,
    )


def _copies_scores(run: PublishedRun, loss: str) -> bool:
    """Whether it is torchtitan's eager loss: not explained, but so in the 12 runs of one report whose fullest device
    has the loss."""
    return is_titan(run) and loss == "log_softmax"


def read(
    reading: Reading, context: Context, strategy: Strategy, tensors: tuple[float, ...]
) -> Predicted:
    """Read the memory of a strategy whose tensors take so many bytes, stage by stage."""
    cluster, made = context.cluster, tensors
    tensors = (*made[:-1], made[-1] + _score_bytes(reading, context, strategy))
    shown = _shown(reading, context, strategy)
    limits = [cluster.memory_of(mesh.devices) for mesh in strategy.meshes]
    asked = set(shown) if reading.kind != "allocated" else set[int]()
    # Tensors are most on the fullest stage; the last has those of the loss, which leave most slack.
    asked |= {
        stage
        for stage in (tensors.index(max(tensors)), len(tensors) - 1)
        if tensors[stage] > FULL * limits[stage]
    }
    room = [
        limit - reading.buffers - (most - own)
        for limit, most, own in zip(limits, tensors, made, strict=True)
    ]
    found = _surroundings(reading, context, strategy, {stage: room[stage] for stage in asked})
    sizes = [tensors[stage] + _beside(reading, found[stage]) for stage in shown]
    return Predicted(
        bytes=max(sizes) + reading.buffers,
        fits=all(
            one.fits and size + reading.buffers <= limit
            for one, size, limit in zip(found, tensors, limits, strict=True)
        ),
    )


def _surroundings(
    reading: Reading, context: Context, strategy: Strategy, room: dict[int, float]
) -> list[Surroundings]:
    """Return what is beside the tensors of each stage: of those asked about, with room for so many bytes."""
    found = [Surroundings() for _ in strategy.meshes]
    if room:
        program = lower(context.graph, strategy, context.facts.samples)
        for stage, left in room.items():
            found[stage] = surroundings(
                program, context.graph, context.cluster, stage, streams=reading.streams,
                software_date=reading.software_date, room=left,
            )  # fmt: skip
    return found


def _beside(reading: Reading, found: Surroundings) -> float:
    """Return the bytes beside the tensors that are read, too."""
    if reading.kind == "allocated":
        return 0
    return found.slack if reading.kind == "reserved" else found.total


def _score_bytes(reading: Reading, context: Context, strategy: Strategy) -> float:
    """Return the bytes of a microbatch's scores, before the loss, on a device that has them once more."""
    keeps = reading.keeps_scores and strategy.pipeline.num_microbatches > 1
    if not keeps and not reading.copies_scores:
        return 0.0
    graph = context.graph
    losses = [
        (one, config)
        for one, config in zip(graph.operators, strategy.configs, strict=True)
        if "cross_entropy" in one.kind
    ]
    found = 0.0
    for one, config in losses:
        pieces = math.prod(
            size
            for size, name in zip(strategy.meshes[config.mesh].sizes, config.dims, strict=True)
            if name
        )
        found += graph.tensors[one.inputs[0]].bytes / pieces
    return found / strategy.pipeline.num_microbatches


def _shown(reading: Reading, context: Context, strategy: Strategy) -> tuple[int, ...]:
    """Return the stages whose devices were looked at."""
    stages = tuple(range(len(strategy.meshes)))
    if reading.where == "last":
        return stages[-1:]
    if reading.where == "first host":
        devices = context.cluster.devices
        host = devices[strategy.meshes[0].devices[0]].host
        return tuple(
            stage
            for stage in stages
            if any(devices[one].host == host for one in strategy.meshes[stage].devices)
        )
    return stages
