"""The Program: the ordered instructions of every device for one training step.

It is the only description of what a strategy does. The simulator runs it with a clock, the runtime
runs it with tensors. Devices that do the same work form a *group* (one mesh), and the Program is
stored once per group: its size does not grow with data-parallel width.

Reading guide. A *value* is one tensor as it lies on one mesh. *Segments* are straight-line pieces of
local computation, *messages* change a value's layout or place. *Instructions* are columns (NumPy
arrays) which say in which order segments and messages run, for which microbatch, waiting for what.
Instruction order is a topological order, and every device executes its own instructions in index
order, so that no order of sends and receives can deadlock.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from shardwright.core.constants import Constants
from shardwright.core.crossing import Piece, adds_up, crossing_shape, pieces_between, whole_shards
from shardwright.core.graph import Constant, tensor_bytes
from shardwright.core.halo import Halos
from shardwright.core.layout import Layout
from shardwright.core.strategy import Mesh, Strategy

Scope = Literal["step", "microbatch"]
ValueRole = Literal[
    "input", "parameter", "buffer", "activation", "gradient", "master", "version",
    "state", "velocity", "factor",
]  # fmt: skip
# Roles of what is there from one step to the next besides parameters and buffers.
STATES: frozenset[ValueRole] = frozenset({"state", "velocity", "factor"})
Purpose = Literal["activation", "gradient", "parameter", "synchronise", "loss"]
TransformName = Literal[
    "cast", "feedback", "top-k", "int8", "1-bit", "top-k sum", "int8 sum", "1-bit sum", "merge",
    "take back", "left factor", "right factor", "factor sum", "version", "buffer",
]  # fmt: skip
Primitive = Literal[
    "slice", "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "transfer", "copy", "halo", "halo_sum",
    "send_receive",
]  # fmt: skip


class ResourceClass(enum.IntEnum):
    """What sort of queue executes instructions. While a device's COMPUTE and LINK resources are busy at
    once they slow each other down (``Cluster.overlap_slowdown``); the others work beside them."""

    COMPUTE = 0
    LINK = 1  # between devices: collectives, and either end of a transfer
    HOST = 2  # the CPU cores that prepare input
    COPY = 3  # between the memories of a host and of its device
    DISK = 4  # storage that input is read from


_OTHERS = {
    "send": ResourceClass.LINK,
    "receive": ResourceClass.LINK,
    "loader": ResourceClass.HOST,
}
_CLASSES = {one.name.lower(): one for one in ResourceClass} | _OTHERS


def resource_classes(names: Iterable[str]) -> NDArray[np.int8]:
    """Return the classes of resources as whoever makes a Program names them: ``compute:0``, ``send:0-1``."""
    return np.array([_CLASSES[name.partition(":")[0]] for name in names], dtype=np.int8)


class Kind(enum.IntEnum):
    """What one instruction does. ``item`` indexes segments, messages, transforms or updates accordingly."""

    FORWARD = 0  # run a segment; keep its autograd graph if the segment is to have a backward
    RECOMPUTE = 1  # run a segment again, keeping the graph this time
    BACKWARD = 2  # vector-Jacobian product of a segment
    MESSAGE = 3  # change layout within one mesh (collective or local slice)
    SEND = 4  # post a transfer to another mesh (does not block)
    RECEIVE = 5  # the other half, on the receiving mesh; same message index
    CLIP = 6  # all groups look at all gradients: their norm, and overflow of a scaled loss
    UPDATE = 7  # optimizer step on some of this mesh's master shards, whose gradients it consumes
    FETCH = 8  # read the samples of a host's ranks from its storage
    COPY = 9  # bring their shards of the batch to the devices of a host
    TRANSFORM = 10  # local work on values that is no operator of the graph
    INPUT_GRADIENT = 11  # BACKWARD but for the gradients of parameters
    WEIGHT_GRADIENT = 12  # the rest of it: these
    PREPARE = 13  # decode and augment what was fetched, on the cores of a host
    DRAW = 14  # take a batch from a rank's loader, whose workers fetch and prepare samples in turn


# What runs a segment, or its backward or a half of that.
BACKWARD_KINDS = (Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)
SEGMENT_KINDS = (Kind.FORWARD, Kind.RECOMPUTE, *BACKWARD_KINDS)
# Messages that go nowhere: a device cuts or copies what it has.
LOCAL = frozenset({"slice", "copy"})
# What brings input, in the order in which a batch goes through it.
INPUT_KINDS = (Kind.FETCH, Kind.PREPARE, Kind.DRAW, Kind.COPY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """One tensor as it lies on one mesh.

    ``shape`` is the local shape on each device, for one microbatch where ``scope`` is
    ``microbatch`` (the runtime then keeps one instance per microbatch in flight). ``tensor`` indexes
    the graph. ``gradient`` is the index of the value that accumulates this value's gradient, -1
    where none flows. ``alias`` names a value with the same data (no instruction makes an alias; it
    exists because its gradient is kept apart). ``halos`` are rows of neighbouring shards that
    ``shape`` counts too. Roles:

    * ``input``: sliced from the batch by the runtime, in whatever layout is asked for;
    * ``buffer``: a buffer or constant of the module, likewise;
    * ``parameter``: resident at rest when ``resident``, else filled by a message and released again;
    * ``master``: the optimizer's shard where that differs from the parameter at rest;
    * ``state``: a residual: zeros at first, read and written by transforms, there from one step to the next.
      It may differ from rank to rank, and checkpoints keep it for each;
    * ``velocity``, ``factor``: likewise, the momentum of what is not sent yet, and PowerSGD's right factor,
      which is equal on all ranks that sum;
    * ``version``: a parameter as one minibatch of an asynchronous pipeline sees it, written by transforms;
    * ``activation``, ``gradient``: made by instructions. Writing to a gradient accumulates.
    """

    tensor: int
    mesh: int
    layout: Layout
    shape: tuple[int, ...]
    dtype: str
    scope: Scope
    role: ValueRole
    gradient: int = -1
    alias: int = -1
    resident: bool = False
    halos: Halos = ()

    @property
    def bytes(self) -> int:
        """What it takes on one device."""
        return tensor_bytes(self.shape, self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One operator inside a segment, with local shapes.

    ``operands`` and ``results`` are value indices, one per operator input and output (-1 for an
    unused output). ``dims`` is the operator's config. ``partial_axes`` are the mesh axes over which
    the result is a term of a sum; operator inputs at the positions ``once`` must be counted by the
    device at coordinate 0 of those axes only (a bias). The result is multiplied by ``scale`` (a mean
    over a split dim). ``offset_dim``: the dim of the first operand whose shard offset the kernel
    must know (the vocabulary of an embedding, the queries of causal attention), else -1.
    ``unpadded``: the dims of the first operand which come with halos, so that the kernel must not
    pad them.
    """

    operator: int
    operands: tuple[int, ...]
    results: tuple[int, ...]
    result_shapes: tuple[tuple[int, ...], ...]
    dims: tuple[str, ...]
    partial_axes: tuple[int, ...] = ()
    once: tuple[int, ...] = ()
    scale: float = 1.0
    offset_dim: int = -1
    unpadded: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A straight-line piece of computation on one mesh between two messages.

    ``inputs`` are values read from outside (parameters and buffers among them), ``outputs`` values
    needed outside. The backward of a segment reads the gradients of ``outputs`` and accumulates into
    the gradients of ``inputs``. ``saved_bytes`` is what autograd keeps from forward to backward
    beyond inputs and outputs, per microbatch; ``temporary_bytes`` (forward, backward) the transient
    peak while it runs, above what it began with and all that it makes; it may be below that.
    ``bare_bytes`` is that of a recomputed segment's first forward, which keeps nothing. Its graph
    holds none of the inputs in ``rematerialised`` and ``unused_in_backward``: backward finds the first
    made again, and does not need the second.

    Where backward is split, INPUT_GRADIENT leaves to WEIGHT_GRADIENT the calls at the places ``deferred``, whose
    gradients of parameters are still to be computed: ``deferred_values`` (inputs, outputs and gradients
    of outputs) and ``deferred_bytes`` beyond them. ``split_temporary_bytes`` are those of the two.
    """

    mesh: int
    block: int
    calls: tuple[Call, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    has_backward: bool
    recomputed: bool = False
    rematerialised: tuple[int, ...] = ()
    unused_in_backward: tuple[int, ...] = ()
    saved_bytes: int = 0
    temporary_bytes: tuple[int, int] = (0, 0)
    bare_bytes: int = 0
    deferred: tuple[int, ...] = field(default=(), repr=False)
    deferred_values: tuple[int, ...] = field(default=(), repr=False)
    deferred_bytes: int = field(default=0, repr=False)
    split_temporary_bytes: tuple[int, int] = field(default=(0, 0), repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A change of layout (within ``mesh``) or of place (to ``destination``).

    Items travel together, one per entry of ``sources`` and ``results``. Per item ``dims`` is
    (from_dim, to_dim): *all_gather* gathers from_dim; *reduce_scatter* and *slice* split to_dim;
    *all_to_all* gathers from_dim and splits to_dim; *halo* brings the neighbours' rows of to_dim, the
    last of the result's ``halos``, and *halo_sum* adds those of from_dim, the last of the source's, to
    the neighbours' own; *send_receive* takes the whole from one place along the axes to another, for each of
    ``pairs``, (sender, receiver); -1 where unused, ``FLAT`` where flat shards are gathered or cut, with their
    padding. ``axes`` are the mesh axes that the group spans. ``bytes`` is the payload of one device: the full local input for all_reduce,
    reduce_scatter and all_to_all, the full local *output* for all_gather, and the most that one device
    sends or receives for halos, pairs and a transfer, whose pieces ``Program.pieces`` lists. ``dtype`` is what
    travels, "" where that is the results' own. ``purpose`` says why it is sent.
    """

    primitive: Primitive
    mesh: int
    axes: tuple[int, ...]
    sources: tuple[int, ...]
    results: tuple[int, ...]
    dims: tuple[tuple[int, int], ...]
    bytes: int
    purpose: Purpose
    destination: int = -1
    dtype: str = ""
    pairs: tuple[tuple[int, int], ...] = ()

    @property
    def is_packed(self) -> bool:
        """Whether what is split is copied into a buffer first, instead of sent from where it lies,
        rank by rank, as it does along its first dim and alone."""
        splits = self.primitive in ("reduce_scatter", "all_to_all")
        return splits and not (len(self.sources) == 1 and self.dims[0][1] == 0)

    @property
    def is_unpacked(self) -> bool:
        """Whether results are copied out of the buffer that arrives, instead of being views of it.

        What is gathered arrives rank by rank, which is its order in memory only along its first dim
        and alone in its buffer.
        """
        gathers = self.primitive in ("all_gather", "all_to_all")
        return gathers and not (len(self.sources) == 1 and self.dims[0][0] == 0)

    @property
    def scatters_gradients(self) -> bool:
        """Whether this is a reduce-scatter that synchronises gradients."""
        return self.primitive == "reduce_scatter" and self.purpose == "synchronise"


@dataclass(frozen=True, slots=True, kw_only=True)
class Transform(Constants):
    """Local work on the values of a mesh that is no operator of the graph.

    What a name does is one function of the tensors it ``reads``, giving those it ``writes``, and what
    it costs another (``runtime.transforms``, ``planner.cost.transforms``); ``constants`` are what
    both go by. As everywhere, writing to a gradient accumulates. Names:

    * ``cast``: each value read, in the dtype of the one written;
    * ``feedback`` (error feedback: Seide et al., 2014; Karimireddy et al., 2019): it reads values and then
      as many residuals, and writes the sums of each pair in the dtype of what is written, and as
      residuals what that lost;
    * ``top-k``, ``int8``, ``1-bit`` (``core.compression``): likewise, but what they write are bytes; by
      ``states`` 0 there are no residuals, by 2 velocities come behind them, of a ``momentum``; ``bound`` times the
      root of its elements is the largest norm of a gradient;
    * ``top-k sum``, ``int8 sum``, ``1-bit sum``: the sum of what so many ``ranks`` made so, of values of
      a ``dtype``; it reads their bytes one behind the other;
    * ``merge``: of what was kept of the sums of some ranks and of others, the largest, in the round ``turn``
      of ``ranks`` places along ``axes`` by a ``compressor``; it reads those, what came (maybe nothing),
      and, where ranks owe what is dropped, residuals;
    * ``take back``: residuals, with what was sent of each and is not among what was kept of all;
    * ``left factor``, ``right factor``, ``factor sum`` (PowerSGD: Vogels et al., 2019): gradients, residuals and right
      factors give what is to be approximated and its left factors; that and their sums orthogonal left and
      right factors; those and the sums of ``ranks`` the sum, residuals and right factors;
    * ``version``: each parameter read, as it is expected to be ``forward + min(i, lag)`` updates later for the
      i-th minibatch since the pipeline was empty; where ``copies`` is 0 they are the parameters themselves, and
      where ``behind`` is more as they were that many updates before, where ``buffered`` is 1 as those that a
      minibatch's first forward saw, ``backward`` tells its half. What is predicted for the first microbatch all of a minibatch have;
    * ``buffer``: each parameter read, kept as it is before its update; where ``averages`` is more than 0 until behind it, when
      the average of how updates went, over that many, is told of it.
    """

    name: TransformName
    mesh: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    purpose: Purpose
    constants: tuple[tuple[str, Constant], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """A tensor that is reported besides the loss.

    What the microbatches made lies one behind the other ``along`` a dim, or ``adds`` up; otherwise
    every microbatch makes all of it.
    """

    name: str
    value: int
    along: int = -1
    adds: bool = False


def data_of(values: Sequence[Value], value: int) -> int:
    """Follow aliases of a value to the one that has the data."""
    while values[value].alias >= 0:
        value = values[value].alias
    return value


def value_pieces(source: Value, here: Mesh, result: Value, there: Mesh) -> tuple[Piece, ...]:
    """Return what travels when ``source`` on one mesh becomes ``result`` on another."""
    if here.sizes == there.sizes and source.layout == result.layout:
        return whole_shards(source.shape, here, there)
    shape = crossing_shape(
        (source.shape, source.layout, here), (result.shape, result.layout, there)
    )
    return pieces_between(shape, here, source.layout, there, result.layout)


@dataclass(frozen=True, eq=False)
class Program:
    """All instructions of one step, in columns of equal length ``num_instructions``.

    ``kind`` (see ``Kind``), ``group`` (mesh index), ``item`` (segment, message, transform or update index, -1
    for the other kinds; an UPDATE of -1 takes all that its mesh trains), ``microbatch`` (-1 when once per step). ``shift``: an instruction of shift s works, in
    step t, for minibatch t - s; None where all work for that of their step. ``position``: instructions of several
    minibatches run in a step by it, then by index; None: by index. ``resource``: index of the queue that
    executes it, ``resource_names`` and ``resource_class`` (see ``ResourceClass``) tell which;
    instructions of one resource run one after another in index order. ``predecessors`` of instruction i are ``predecessor[offset[i]:offset[i+1]]``,
    all smaller than i. ``frees``: values whose last use is instruction i,
    ``free_value[free_offset[i]:free_offset[i+1]]``. Memory per device of the group:
    ``allocated`` bytes appear at the start of the instruction, ``freed`` disappear at its end,
    ``temporary`` exist only while it runs; ``base_bytes`` per mesh are there all the time. What a
    message has under way, and what a message frees that is sent from where it lies, stays until it
    is completed (``core.completion``).

    ``updates`` are tuples of the values that an UPDATE takes: parameters at rest, or masters.

    ``loss`` is the value whose sum over microbatches and ``PARTIAL`` axes is the training loss;
    ``outputs`` are reported besides. Both live until the end of the step.
    """

    strategy: Strategy
    values: tuple[Value, ...]
    segments: tuple[Segment, ...]
    messages: tuple[Message, ...]
    loss: int
    kind: NDArray[np.int8]
    group: NDArray[np.int32]
    item: NDArray[np.int32]
    microbatch: NDArray[np.int32]
    resource: NDArray[np.int32]
    resource_names: tuple[str, ...]
    resource_class: NDArray[np.int8]
    offset: NDArray[np.int64]
    predecessor: NDArray[np.int32]
    free_offset: NDArray[np.int64]
    free_value: NDArray[np.int32]
    allocated: NDArray[np.int64]
    freed: NDArray[np.int64]
    temporary: NDArray[np.int64]
    base_bytes: tuple[int, ...]
    outputs: tuple[Output, ...] = ()
    shift: NDArray[np.int32] | None = None
    position: NDArray[np.int32] | None = None
    transforms: tuple[Transform, ...] = ()
    updates: tuple[tuple[int, ...], ...] = ()

    @property
    def meshes(self) -> tuple[Mesh, ...]:
        """The device groups."""
        return self.strategy.meshes

    @property
    def num_instructions(self) -> int:
        """How many instructions all groups have together."""
        return len(self.kind)

    @cached_property
    def under_way(self) -> int:
        """How many minibatches are under way: one, but of a pipeline that is never flushed. Minibatch i has what it
        has in the place i modulo that."""
        if self.shift is None or self.strategy.pipeline.is_flushed:
            return 1
        return int(self.shift.max(initial=0)) + 1

    @property
    def ring(self) -> int:
        """How many instances of a microbatch's values there are: one for each of all minibatches under way."""
        return self.under_way * self.strategy.pipeline.num_microbatches

    @property
    def computes(self) -> NDArray[np.bool_]:
        """By instruction, whether it computes on a device: its host stays with it."""
        return (self.resource_class == ResourceClass.COMPUTE)[self.resource]

    def shift_of(self, index: int) -> int:
        """Return by how many steps the minibatch of an instruction is older than the step's own."""
        return 0 if self.shift is None else int(self.shift[index])

    @property
    def turns(self) -> NDArray[np.int64]:
        """The instructions in the order in which they run in a step, whichever minibatch each works for."""
        index = np.arange(self.num_instructions)
        return index if self.position is None else np.argsort(self.position, kind="stable")

    def pieces(self, item: int) -> tuple[tuple[Piece, ...], ...]:
        """Return what travels in transfer ``item``, for each of its sources."""
        message = self.messages[item]
        here, there = self.meshes[message.mesh], self.meshes[message.destination]
        return tuple(
            value_pieces(self.values[source], here, self.values[result], there)
            for source, result in zip(message.sources, message.results, strict=True)
        )

    def sums(self, item: int) -> tuple[bool, ...]:
        """Return, for each source of transfer ``item``, whether its pieces are terms that are added up."""
        message = self.messages[item]
        ends = zip(message.sources, message.results, strict=True)
        return tuple([adds_up(self.values[a].layout, self.values[b].layout) for a, b in ends])

    def describe(self, index: int) -> str:
        """Name an instruction as people read it, such as ``stage 1 F block 3 microbatch 2``."""
        kind = Kind(int(self.kind[index]))
        where = f"stage {int(self.group[index])}"
        when = "" if self.microbatch[index] < 0 else f" microbatch {int(self.microbatch[index])}"
        item = int(self.item[index])
        if kind in SEGMENT_KINDS:
            name = kind.name.lower().replace("_", " ")
            return f"{where} {name} segment {item} (block {self.segments[item].block}){when}"
        if kind in (Kind.MESSAGE, Kind.SEND, Kind.RECEIVE):
            message = self.messages[item]
            verb = message.primitive if kind == Kind.MESSAGE else kind.name.lower()
            return f"{where} {verb} {item} ({message.purpose}, {message.bytes} bytes){when}"
        if kind == Kind.TRANSFORM:
            transform = self.transforms[item]
            return f"{where} {transform.name} {item} ({transform.purpose}){when}"
        if kind == Kind.UPDATE and item >= 0:
            return f"{where} update of {len(self.updates[item])} parameters{when}"
        return f"{where} {kind.name.lower()}"
