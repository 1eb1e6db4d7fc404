"""The mutable builder of a Program: values, segments and messages while lowering fills them in.

A *step* is an instruction before it is told which microbatch it belongs to. Each stage writes its
steps into five lists; ``assemble`` lays them out for every microbatch.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypedDict, TypeVar, Unpack

from shardwright.core.graph import DTYPE_BYTES
from shardwright.core.halo import Halos, check_reach, extended_shape, most_moved
from shardwright.core.layout import Layout, local_shape
from shardwright.core.program import (
    LOCAL,
    Kind,
    Message,
    Output,
    Purpose,
    Scope,
    Segment,
    Transform,
    Value,
    ValueRole,
)
from shardwright.core.strategy import Mesh, ParameterConfig, Strategy, master_dtype
from shardwright.planner.cost.recomputation import needed_again
from shardwright.planner.lower.ground import Ground
from shardwright.planner.space.redistribute import Step as Reshard
from shardwright.planner.space.redistribute import reshard_steps

# Marks of a value, in ``ProgramBuilder.marks``.
BY_MICROBATCH, GRADIENT, ACTIVATION, GATHERED = 1, 2, 4, 8
WIDE = 16  # a gradient in twice the bytes of what is added to it

Made = TypeVar("Made")
Pairs = Sequence[tuple[int, int]]  # of values, source and result
# Of a state: tensor, mesh, layout, dtype, role, and shape where that does not follow.
Kept = tuple[int, int, Layout, str, ValueRole, tuple[int, ...]]
Said = tuple[int, int, Layout, Scope, ValueRole]  # of a value: tensor, mesh, layout, scope, role
Like = tuple[int, int, int, int]  # a value, and what are not its own: mesh, gradient, alias


class Extra(TypedDict, total=False):
    """What only some values have; see ``Value``. ``dtype`` defaults to the tensor's own."""

    dtype: str
    gradient: int
    alias: int
    resident: bool
    halos: Halos
    shape: tuple[int, ...]  # where that does not follow from the layout


@dataclass(slots=True)
class Step:
    """One instruction of a template. ``last_only``: runs with the last microbatch only."""

    kind: Kind
    item: int
    resource: str
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    last_only: bool = False


@dataclass(frozen=True, slots=True)
class Finished:
    """A segment with only the outputs that somebody reads, those that its backward needs, which of its outputs lie in the
    storage of which input or other output, and the bytes that outputs hold where their shapes do not say."""

    segment: Segment
    saved: frozenset[int]
    views: dict[int, int]
    stored: dict[int, int]


class ProgramBuilder:
    """Values, segments and messages of the Program being made, and the facts they are made from."""

    def __init__(self, ground: Ground, strategy: Strategy) -> None:
        self.ground = ground
        self.graph, self.samples, self.iterations = ground.graph, ground.samples, ground.iterations
        self.values: list[Value] = []
        self.segments: list[Segment] = []
        self.messages: list[Message] = []
        self.transforms: list[Transform] = []
        self.reduced: set[int] = set()  # gradients that optimizers read
        self.residuals: dict[Kept, int] = {}  # see ``lot.state_of``
        self.asked: dict[int, tuple[Said, Extra]] = {}  # how values were asked for
        self.made: list[int] = []  # values since ``make_for`` was told of a maker
        # Columns of ``values``: bytes, data's own value, mesh, marks.
        self.sizes, self.roots, self.meshes, self.marks = (array("q") for _ in range(4))
        self._signatures: dict[tuple[int, Layout], tuple[object, ...]] = {}
        self.resources: dict[str, int] = {}
        # Messages of equal meshes take the same links, in turn.
        self.links = [strategy.meshes.index(mesh) for mesh in strategy.meshes]
        # By parameter how it was kept last: config, mesh, and what ``Parameters`` made of it.
        self.last_kept: dict[int, tuple[ParameterConfig, int, object]] = {}
        self.begin(strategy)

    def begin(self, strategy: Strategy) -> None:
        """Take up a strategy: nothing is known of it yet."""
        graph = self.graph
        self.strategy = strategy
        self.lasting: list[int] = []  # values that are there all the time
        self.kept_for_backward = frozenset(
            tensor
            for tensor, config in zip(graph.parameters, strategy.parameters, strict=True)
            if config.keeps
        )
        inside = graph.operators_of(strategy.recompute)
        asked = frozenset(strategy.recompute_operators).union(inside)
        again = ("run again", strategy.recompute, strategy.recompute_operators)
        self.recomputed = self.once(again, partial(needed_again, graph, asked))
        self.segment_starts = frozenset(strategy.segment_starts)
        self.splits_backward = strategy.pipeline.splits_backward
        self.outputs: tuple[Output, ...] = ()
        self.external: set[int] = set()
        self.begun: list[tuple[int, Segment]] = []  # segments as they are before they are finished
        self.turned: list[tuple[int, int]] = []  # parameters at rest told their gradients
        self.updates: list[tuple[int, ...]] = []  # what each update takes, where it says so
        # Outputs that a segment's backward needs, values in whose storage outputs lie, and bytes that they hold.
        self.saved, self.views = dict[int, frozenset[int]](), dict[int, int]()
        self.stored: dict[int, int] = {}
        # The dim along which what depends on no batch (an initial state of zeros) is read by sample.
        self.cut_dim: dict[int, int] = {}

    def resource(self, name: str) -> int:
        """Return the number of a resource."""
        return self.resources.setdefault(name, len(self.resources))

    def mesh(self, index: int) -> Mesh:
        """Return a mesh by index."""
        return self.strategy.meshes[index]

    @property
    def makes_again(self) -> bool:
        """Whether anything is made again before backward."""
        asked = self.strategy
        return bool(asked.recompute or asked.recompute_operators or asked.reshard_again)

    def master_dtype(self, tensor: int) -> str:
        """Return the dtype in which the optimizer keeps a parameter."""
        return master_dtype(self.strategy.precision, self.own_dtype(tensor))

    def sum_dtype(self, tensor: int) -> str:
        """Return the dtype in which a parameter's gradients of all microbatches add up."""
        several = self.strategy.pipeline.num_microbatches > 1
        adds_wide = several and self.strategy.accumulation == "float32"
        return self.master_dtype(tensor) if adds_wide else self.own_dtype(tensor)

    def own_dtype(self, tensor: int) -> str:
        """Return a tensor's dtype in the graph, in which it and its gradient travel."""
        return self.graph.tensors[tensor].dtype

    def whole_shape(self, tensor: int, scope: Scope) -> tuple[int, ...]:
        """Return a tensor's shape before sharding, for one microbatch where the scope says so."""
        shape = list(self.graph.tensors[tensor].shape)
        dim = self.samples.tensor_dim[tensor]
        dim = self.cut_dim.get(tensor, -1) if dim < 0 else dim
        if scope == "microbatch" and dim >= 0:
            shape[dim] //= self.strategy.pipeline.num_microbatches
        return tuple(shape)

    def add_value(
        self,
        tensor: int,
        mesh: int,
        layout: Layout,
        scope: Scope,
        role: ValueRole,
        **extra: Unpack[Extra],
    ) -> int:
        """Append a value and return its index."""
        return self.ask((tensor, mesh, layout, scope, role), extra)

    def ask(self, said: Said, extra: Extra) -> int:
        """Return the number of a value."""
        number = self._number(said, extra)
        self.made.append(number)
        return number

    def ask_like(
        self, like: Like, asked: Callable[[int, int, int, int], tuple[Said, Extra]]
    ) -> int:
        """Return the number of a value that is ``like`` another, and ``asked`` for so."""
        return self.ask(*asked(*like))

    def _number(self, said: Said, extra: Extra) -> int:
        tensor, mesh, layout, scope, role = said
        spec = self.graph.tensors[tensor]
        is_fixed = spec.role in ("parameter", "buffer", "constant")
        size_scope: Scope = "step" if is_fixed else scope
        halos = extra.get("halos", ())
        shape = extra.get("shape") or extended_shape(
            local_shape(self.whole_shape(tensor, size_scope), layout, self.mesh(mesh).sizes), halos
        )
        alias, resident = extra.get("alias", -1), extra.get("resident", False)
        self.asked[len(self.values)] = said, extra
        return self.append(
            Value(
                tensor=tensor,
                mesh=mesh,
                layout=layout,
                shape=shape,
                dtype=extra.get("dtype") or spec.dtype,
                scope=scope,
                role=role,
                gradient=extra.get("gradient", -1),
                alias=alias,
                resident=resident,
                halos=halos,
            )
        )

    def append(self, value: Value) -> int:
        """Append a value and return its index."""
        index, own = len(self.values), value.alias < 0
        outside = value.role in ("input", "buffer") or value.resident
        size = math.prod(value.shape) * DTYPE_BYTES[value.dtype] if own and not outside else 0
        wide = DTYPE_BYTES[value.dtype] > DTYPE_BYTES[self.own_dtype(value.tensor)]
        self.values.append(value)
        self.sizes.append(size)
        self.roots.append(index if own else self.roots[value.alias])
        self.meshes.append(value.mesh)
        self.marks.append(
            BY_MICROBATCH * (value.scope == "microbatch")
            + GRADIENT * (value.role == "gradient")
            + ACTIVATION * (value.role == "activation")
            + GATHERED * (value.role == "parameter" and not value.resident)
            + WIDE * (value.role == "gradient" and wide)
        )
        return index

    def make_for(self, maker: Hashable) -> None:
        """Say who asks for the values that follow; a builder that outlives one lowering finds those
        which it asked for before."""
        if maker is not None:
            self.made = []

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """Return what ``make`` makes; ``key`` says what it is made of, and for what. A builder that
        outlives one lowering makes it once."""
        del key
        return make()

    def turn(self, told: Sequence[tuple[int, int]]) -> None:
        """Tell parameters at rest where their gradients accumulate: the first use of each decides."""
        for value, gradient in told:
            self.values[value] = replace(self.values[value], gradient=gradient)
        self.turned += told

    def add_segment(self, segment: Segment) -> int:
        """Append a segment and return its index."""
        self.segments.append(segment)
        self.begun.append((len(self.segments) - 1, segment))
        return len(self.segments) - 1

    def add_message(self, message: Message) -> int:
        """Append a message and return its index."""
        self.messages.append(message)
        return len(self.messages) - 1

    def take(self, index: int, finished: Finished) -> None:
        """Put a finished segment where it began."""
        self.segments[index] = finished.segment
        self.saved[index] = finished.saved
        self.views.update(finished.views)
        self.stored.update(finished.stored)

    def storage(self, value: int) -> int:
        """Return the value in whose memory a value lies: that of its data, or what that views."""
        value = self.roots[value]
        while value in self.views:
            value = self.roots[self.views[value]]
        return value

    def bytes_of(self, value: int) -> int:
        """Bytes one device needs for a value; views of other data need none."""
        return 0 if value in self.views else self.sizes[value]

    def base_of(self, value: int) -> int:
        """Return one device's bytes of a value that lasts, optimizer states of it included."""
        entry = self.values[value]
        if entry.alias >= 0:
            return 0
        own = self.values[value].bytes
        if entry.role not in ("parameter", "master") or entry.gradient not in self.reduced:
            return own
        reduced = self.values[entry.gradient]
        is_master = entry.role == "master" or (
            reduced.layout == entry.layout and reduced.dtype == entry.dtype
        )
        return own * (1 + self.strategy.optimizer_states) if is_master else own

    def base_bytes(self, mesh: int) -> int:
        """Bytes of one device that are there all the time: parameters, masters, states, buffers."""
        return sum([self.base_of(value) for value in self.lasting if self.meshes[value] == mesh])

    def segment_order(self) -> list[int]:
        """Return the segments of this lowering in the order in which they were made."""
        return [index for index, _ in self.begun]

    def reshard(self, source: int, target: Layout, dtype: str = "") -> tuple[Reshard, ...]:
        """Return the steps that bring a value to another layout, in its tensor's dtype or another."""
        entry = self.values[source]
        scope: Scope = "step" if entry.role in ("parameter", "master") else entry.scope
        if self.graph.tensors[entry.tensor].role == "parameter":
            scope = "step"
        shape = self.whole_shape(entry.tensor, scope)
        dtype = dtype or self.own_dtype(entry.tensor)
        return reshard_steps(shape, dtype, entry.layout, target, self.mesh(entry.mesh).sizes)

    def chain(
        self, pairs: Pairs, purpose: Purpose, *, last_only: bool = False, dtype: str = ""
    ) -> list[Step]:
        """Return message steps that bring each (source, result) pair to its result's layout.

        All pairs must need the same primitives on the same axes; they travel together, in ``dtype``
        or the one that the graph gives them: float32 masters are cast before they are gathered, sums
        after they have arrived. A pair whose layouts agree is copied (a change of dtype).
        """
        plans = [self.reshard(one, self.values[other].layout, dtype) for one, other in pairs]
        if not plans[0]:
            return [self._copy(pairs, purpose, last_only)]
        own = dtype or self.own_dtype(self.values[pairs[0][0]].tensor)
        steps: list[Step] = []
        current, results = map(list, zip(*pairs, strict=True))
        for depth, moves in enumerate(zip(*plans, strict=True)):
            targets = results
            if depth < len(plans[0]) - 1:
                targets = self._between(pairs, moves, dtype)
            message = Message(
                primitive=moves[0].primitive,
                mesh=self.values[current[0]].mesh,
                axes=moves[0].axes,
                sources=tuple(current),
                results=tuple(targets),
                dims=tuple([(move.from_dim, move.to_dim) for move in moves]),
                bytes=sum([move.bytes for move in moves]),
                purpose=purpose,
                dtype="" if self.values[targets[0]].dtype == own else own,
            )
            steps.append(self.message_step(message, last_only=last_only))
            current = targets
        return steps

    def exchange_halos(self, source: int, result: int, purpose: Purpose) -> Step:
        """Return the message that adds the last of the result's halos, or, on the way back, gives
        those of the source to the neighbours that they belong to.

        Raises ValueError where a shard is smaller than the halo.
        """
        one, other = self.values[source], self.values[result]
        is_forward = len(other.halos) > len(one.halos)
        own, halo = (one.shape, other.halos[-1]) if is_forward else (other.shape, one.halos[-1])
        check_reach(own, halo)
        moved = most_moved(own, halo, self.mesh(one.mesh).sizes)
        message = Message(
            primitive="halo" if is_forward else "halo_sum",
            mesh=one.mesh,
            axes=halo.axes,
            sources=(source,),
            results=(result,),
            dims=((-1, halo.dim) if is_forward else (halo.dim, -1),),
            bytes=moved * DTYPE_BYTES[one.dtype],
            purpose=purpose,
        )
        return self.message_step(message)

    def _between(self, pairs: Pairs, moves: Sequence[Reshard], dtype: str) -> list[int]:
        """Return the values that pairs have on the way to their results, behind these moves."""
        extra: Extra = {"dtype": dtype} if dtype else {}
        found: list[int] = []
        for (source, result), move in zip(pairs, moves, strict=True):
            entry, final = self.values[source], self.values[result]
            role: ValueRole = "gradient" if final.role == "gradient" else "activation"
            args = (entry.tensor, entry.mesh, move.layout, entry.scope, role)
            found.append(self.add_value(*args, **extra))
        return found

    def _copy(self, pairs: Pairs, purpose: Purpose, last_only: bool) -> Step:
        message = Message(
            primitive="copy",
            mesh=self.values[pairs[0][0]].mesh,
            axes=(),
            sources=tuple(source for source, _ in pairs),
            results=tuple(result for _, result in pairs),
            dims=((-1, -1),) * len(pairs),
            bytes=sum(self.bytes_of(result) for _, result in pairs),
            purpose=purpose,
        )
        return self.message_step(message, last_only=last_only)

    def signature(self, source: int, target: Layout) -> tuple[object, ...]:
        """Return what must agree for two pairs to share messages."""
        key = (source, target)
        if key not in self._signatures:
            entry = self.values[source]
            steps = tuple([(step.primitive, step.axes) for step in self.reshard(source, target)])
            self._signatures[key] = (entry.mesh, entry.dtype, steps)
        return self._signatures[key]

    def message_step(self, message: Message, *, last_only: bool = False) -> Step:
        """Append a message within one mesh and return its step."""
        item = self.add_message(message)
        is_local = message.primitive in LOCAL
        axes = ".".join(self.mesh(message.mesh).axes[axis] for axis in message.axes)
        link = f"link:{self.links[message.mesh]}:{axes}"
        self.external.update(message.sources)
        return Step(
            kind=Kind.MESSAGE,
            item=item,
            resource=f"compute:{message.mesh}" if is_local else link,
            reads=message.sources,
            writes=message.results,
            last_only=last_only,
        )

    def transform_step(
        self,
        transform: Transform,
        reads: tuple[int, ...],
        writes: tuple[int, ...],
        *,
        last_only: bool = False,
    ) -> Step:
        """Append a transform and return its step.

        The step does not say that it touches residuals: these are there all the time, and what does runs in
        the order of its mesh's computation.
        """
        self.transforms.append(transform)
        self.external.update(reads)
        return Step(
            kind=Kind.TRANSFORM,
            item=len(self.transforms) - 1,
            resource=f"compute:{transform.mesh}",
            reads=reads,
            writes=writes,
            last_only=last_only,
        )
