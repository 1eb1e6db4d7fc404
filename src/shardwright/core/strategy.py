"""A point of the search space: where every operator and parameter lies.

A strategy means nothing without its graph. Data, tensor, pipeline, ZeRO and recomputation are not
kinds of strategy but what certain choices add up to.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal

from shardwright.core.layout import Layout
from shardwright.core.schedules import SCHEDULES, ScheduleName
from shardwright.core.staleness import TITLES, Staleness, lateness

Precision = Literal["float64", "float32", "bfloat16", "float16", "fp8", "fp8-row"]
SyncEvery = Literal["step", "microbatch"]
Recomputation = Literal["none", "attention", "selective", "blocks"]
Accumulation = Literal["float32", "own"]
Updates = Literal["step", "ready", "microbatch"]
WireDtype = Literal["parameter", "float32", "bfloat16", "float16"]
Compressor = Literal["none", "top-k", "gtop-k", "gtop-k-tree", "int8", "1-bit", "powersgd"]
Residual = Literal["conserving", "paper", "none"]
# Precisions whose masters, optimizer states and reduced gradients are float32.
MIXED = frozenset({"bfloat16", "float16", "fp8", "fp8-row"})
REAL = frozenset({"float64", "float32", "bfloat16", "float16"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Devices arranged by named axes, row-major: the last axis varies fastest."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    devices: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.axes) != len(self.sizes) or len(set(self.axes)) != len(self.axes):
            raise ValueError(f"mesh axes {self.axes} and sizes {self.sizes} do not match")
        if math.prod(self.sizes) != len(self.devices) or len(set(self.devices)) != len(
            self.devices
        ):
            raise ValueError(
                f"mesh of sizes {self.sizes} needs that many different devices, not {self.devices[:12]}"
            )

    def coordinate(self, device: int) -> tuple[int, ...]:
        """Return the position of a device on every axis."""
        index = self.devices.index(device)
        place: list[int] = []
        for size in reversed(self.sizes):
            place.append(index % size)
            index //= size
        return tuple(reversed(place))

    def peers(self, device: int, axes: tuple[int, ...]) -> tuple[int, ...]:
        """Return the devices that differ from ``device`` only on ``axes``, in mesh order."""
        places = [0]
        for axis, (size, mine) in enumerate(zip(self.sizes, self.coordinate(device), strict=True)):
            steps = range(size) if axis in axes else (mine,)
            places = [place * size + step for place in places for step in steps]
        return tuple(self.devices[place] for place in places)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorConfig:
    """Where one operator runs and which mesh axis splits which of its dims.

    ``mesh`` indexes ``Strategy.meshes`` (the pipeline stage, when there is a pipeline). ``dims`` has
    one entry per mesh axis: the name of a dim of the operator's iteration space, or "" where every
    device along the axis does the same work.
    """

    mesh: int
    dims: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterConfig:
    """How one parameter is kept between its uses, on the mesh of its first use or another.

    ``rest`` is the layout of the stored parameter, ``optimizer`` that of the master copy, the
    optimizer state and the reduced gradient. ZeRO-1 shards ``optimizer`` only, ZeRO-2 also reduces
    gradients in every microbatch (``sync="microbatch"``), ZeRO-3 shards ``rest`` as well. What is
    sharded at rest is gathered before forward and again before backward, or, if ``keeps``, held
    from the one to the other: less traffic, more memory.

    ``mesh``, where it is not -1, is a mesh before those that use the parameter, on which it lies and is
    updated: a parameter server, which may run no operators. Its users pull it before forward, and push
    their terms of its gradient as backward makes them, which are added up there.
    """

    rest: Layout
    optimizer: Layout
    sync: SyncEvery = "step"
    keeps: bool = False
    mesh: int = field(default=-1, repr=False)  # see ``digest_of``


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Schedule and microbatches; with one mesh and one microbatch there is no pipeline.

    ``order`` is that of a ``custom`` schedule: one line per crew, the devices of the same meshes, of
    actions such as ``2F0`` (mesh 2, forward of microbatch 0) and ``1B3``, or ``1I3`` and ``1W3``.
    ``staleness``: where it is not ``none`` the pipeline is never flushed, and it says on which weights
    minibatches run (``core.staleness``).
    """

    schedule: ScheduleName = "1f1b"
    num_microbatches: int = 1
    order: tuple[str, ...] = field(default=(), repr=False)  # see ``digest_of``
    staleness: Staleness = field(default="none", repr=False)  # likewise

    def __post_init__(self) -> None:
        if self.num_microbatches < 1:
            raise ValueError("a pipeline needs at least one microbatch")

    @property
    def is_flushed(self) -> bool:
        """Whether a step ends with the last backward of its own batch."""
        return self.staleness == "none"

    @property
    def title(self) -> str:
        """The schedule as people read it."""
        return self.schedule if self.is_flushed else TITLES[self.staleness]

    @property
    def splits_backward(self) -> bool:
        """Whether the backward is two actions, I and W, of any microbatch and then of all."""
        return SCHEDULES[self.schedule].splits or any(set(line) & {"I", "W"} for line in self.order)


def master_dtype(precision: str, own: str) -> str:
    """Return the dtype in which the optimizer keeps a parameter whose ``own`` is that of the graph."""
    return "float32" if precision in MIXED else own


def wire_dtype(asked: WireDtype, own: str) -> str:
    """Return the dtype in which gradients of parameters of dtype ``own`` travel; complex ones and
    those of whoever asks for nothing travel in their own."""
    return own if asked == "parameter" or own not in REAL else asked


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    """What goes with a compressor, from step to step.

    ``residual``: what is not sent is added to the next gradient (``conserving``); by gTop-k's published
    rule, which loses what is dropped while merging (``paper``); or forgotten (``none``). ``rank``: columns
    of PowerSGD's factors. ``momentum`` runs before the selection (momentum correction): the optimizer's is for
    what travels whole only. ``masked``: it begins anew where something was sent; else nothing of it is lost.
    ``local_norm`` (0: none) bounds the norm of what all devices together put in before the selection, each
    parameter of each device by its share.
    ``warm_up``: for so many steps each, the first steps send the densities of ``core.compression.WARM_UP``.
    """

    residual: Residual = "conserving"
    rank: int = 1
    momentum: float = 0.0
    masked: bool = True
    local_norm: float = 0.0
    warm_up: int = 0

    @property
    def words(self) -> str:
        """What is otherwise than where nobody says anything: ``rank 2, momentum 0.9``."""
        said = [
            (one.name.replace("_", " "), getattr(self, one.name), one.default)
            for one in fields(self)
        ]
        return ", ".join(f"{name} {value}" for name, value, usual in said if value != usual)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientSync:
    """Which gradients travel together.

    ``buckets`` are tuples of parameter tensor indices, in the order in which backward makes them
    ready; parameters in no bucket travel alone. ``method`` names the rule that chose them
    (``optimal``, ``mgwfbp``, ``wfbp``, ``single``, ``block``: one bucket per block, ``capped``: full
    at a given size, as torch's DistributedDataParallel does). ``dtype`` is what real gradients travel
    and are summed in between devices, ``parameter`` for each parameter's own; they add up over
    microbatches, and reach the optimizer, in the dtypes that they have without it. ``error_feedback``:
    what a device's gradient loses where it is rounded for the wire is added to the next that it sends.

    ``compressor``: sums over devices are taken of what is left of each device's gradient: its elements
    of largest magnitude (``top-k``, a ``density`` of them), 255 levels (``int8``), or its signs
    (``1-bit``); or what is left of the sum: its largest elements (``gtop-k``, by recursive doubling, and
    ``gtop-k-tree``), or factors of low rank (``powersgd``). What that loses is added to the next
    (``feedback``). Gradients that are scattered (ZeRO), cross to
    another mesh, or have few elements are sent whole. See ``planner.lower.compress``. ``apart`` are
    (parameter, compressor, density) of those that are compressed otherwise than the rest, or not.
    """

    method: str = "wfbp"
    buckets: tuple[tuple[int, ...], ...] = ()
    dtype: WireDtype = "parameter"
    error_feedback: bool = field(default=False, repr=False)  # see ``digest_of``
    compressor: Compressor = field(default="none", repr=False)
    density: float = field(default=1.0, repr=False)
    feedback: Feedback = field(default=Feedback(), repr=False)
    apart: tuple[tuple[int, Compressor, float], ...] = field(default=(), repr=False)

    @property
    def compressors(self) -> tuple[Compressor, ...]:
        """What compresses gradients, of any parameter."""
        named: tuple[Compressor, ...] = (self.compressor, *[how for _, how, _ in self.apart])
        return tuple([one for one in dict.fromkeys(named) if one != "none"])

    @property
    def feeds_back(self) -> bool:
        """Whether what gradients lose on their way is kept, and added to the next."""
        is_kept = bool(self.compressors) and self.feedback.residual != "none"
        return self.error_feedback or is_kept

    @property
    def wire(self) -> str:
        """What gradients travel in: a dtype, or what compresses them."""
        return " or ".join(self.compressors) or self.dtype

    def of(self, parameter: int) -> GradientSync:
        """Return how the gradient of one parameter travels."""
        for one, compressor, density in self.apart:
            if one == parameter:
                return replace(self, compressor=compressor, density=density, apart=())
        return self

    def carrying(self, other: GradientSync) -> GradientSync:
        """Return this with what travels together, and why, of another."""
        return replace(self, method=other.method, buckets=other.buckets)

    @property
    def is_merged(self) -> bool:
        """Whether gradients of several blocks may travel together."""
        return self.method in {"optimal", "capped"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """A config per operator and per parameter, the pipeline, what is recomputed, what runs as one.

    ``parameters`` follows the order of ``OperatorGraph.parameters``. ``recompute`` lists block
    indices whose activations are computed again in backward, messages included;
    ``recompute_operators`` lists operators of other blocks whose results are dropped after forward and
    computed again (what leaves the block is kept). What follows the last of a block that its
    backward needs is not run again (see ``planner.cost.recomputation``). ``reshard_again`` lists activations whose copies in
    other layouts are dropped after forward and made again by the same messages before backward.
    ``segment_starts`` lists operators before which a segment ends although nothing moves there: what
    comes after them has its gradients, and lets them travel, before the backward of the rest.
    ``batch_norm`` says whose batch the statistics are taken over (``local``: each device's shard of
    each microbatch, as DDP does).
    ``precision`` float16 also scales the loss; fp8 and fp8-row are bfloat16 with products in 8 bits
    (``core.float8``).
    ``optimizer_states`` counts the tensors which the optimizer keeps per parameter (AdamW 2),
    ``clips`` whether the gradient is clipped by its global norm before the update, ``max_norm`` to what
    (0: whoever runs it says so).
    ``accumulation``: the dtype in which gradients of several microbatches add up where parameters have
    a narrower one, ``own`` for the parameters'; it costs memory only, since they travel in their own.
    ``updates``: at the end of a ``step``, or of each parameter when its gradient is ``ready``, which is then
    freed; those whose gradients come from several meshes wait for the end all the same. Of each so after
    every ``microbatch``, by its share of the gradient, on one mesh.
    ``label`` is what people call it ("data parallel x 2, ZeRO-1").
    """

    meshes: tuple[Mesh, ...]
    configs: tuple[OperatorConfig, ...]
    parameters: tuple[ParameterConfig, ...]
    pipeline: Pipeline = Pipeline()
    gradient_sync: GradientSync = GradientSync()
    recompute: tuple[int, ...] = ()
    recompute_operators: tuple[int, ...] = ()
    reshard_again: tuple[int, ...] = ()
    segment_starts: tuple[int, ...] = ()
    precision: Precision = "float32"
    batch_norm: Literal["local", "synchronised"] = "local"
    optimizer_states: int = 2
    clips: bool = False
    max_norm: float = 0.0
    accumulation: Accumulation = "float32"
    updates: Updates = field(default="step", repr=False)  # see ``digest_of``
    label: str = ""

    @property
    def staleness(self) -> int:
        """By how many updates of its stage a gradient is late at most."""
        return lateness(self.pipeline.staleness, len(self.meshes), self.pipeline.num_microbatches)

    @property
    def chunks(self) -> int:
        """How many parts of the model a device of a pipeline has by turns, at most."""
        if not SCHEDULES[self.pipeline.schedule].chunks:
            return 1
        return max(Counter(mesh.devices for mesh in self.meshes).values())

    def home(self, parameter: ParameterConfig, readers: Iterable[int]) -> int:
        """Return the mesh on which a parameter that some operators read lies and is updated, -1 where
        none reads it."""
        first = self.first_use(readers)
        return first if parameter.mesh < 0 or first < 0 else parameter.mesh

    def first_use(self, readers: Iterable[int]) -> int:
        """Return the first mesh on which some operators run, -1 where there are none."""
        return min([self.configs[one].mesh for one in readers], default=-1)

    def serves(self, parameter: ParameterConfig, readers: Iterable[int]) -> bool:
        """Whether a parameter lies on a mesh whose own operators do not read it."""
        return parameter.mesh >= 0 and parameter.mesh not in {
            self.configs[one].mesh for one in readers
        }

    @property
    def devices(self) -> tuple[int, ...]:
        """All devices in use, ascending."""
        crews = {mesh.devices for mesh in self.meshes}
        return tuple(sorted(set[int]().union(*crews)))


def crews_of(meshes: Sequence[Mesh]) -> dict[tuple[int, ...], list[int]]:
    """Return the numbers of meshes by their devices."""
    crews: dict[tuple[int, ...], list[int]] = {}
    for number, mesh in enumerate(meshes):
        crews.setdefault(mesh.devices, []).append(number)
    return crews


def sorts_of_devices(crews: Mapping[tuple[int, ...], Sequence[int]]) -> dict[int, frozenset[int]]:
    """Return the meshes of every device, given meshes by their devices."""
    on: dict[int, tuple[int, ...]] = {}  # by device, the crews it belongs to
    for number, devices in enumerate(crews):
        on.update((device, (*on.get(device, ()), number)) for device in devices)
    own = list(crews.values())
    sorts = {one: frozenset(m for crew in one for m in own[crew]) for one in set(on.values())}
    return {device: sorts[one] for device, one in on.items()}
