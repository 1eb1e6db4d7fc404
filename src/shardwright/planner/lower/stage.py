"""Forward lowering of one mesh: operators in order become segments, with messages between them.

Every operand is *acquired* at the pair of layouts (value, gradient) its operator wants. Where the
tensor lies otherwise, the open segment ends and messages are written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from shardwright.core.halo import Halos
from shardwright.core.layout import PARTIAL, REPLICATE, Layout
from shardwright.core.program import Call, Kind, Message, Scope, Segment
from shardwright.planner.lower.builder import ProgramBuilder, Step
from shardwright.planner.lower.parameters import Parameters, Use
from shardwright.planner.space.configs import Pair, Placements, placements


@dataclass(slots=True)
class Entry:
    """A forward step, with what its reversal needs.

    ``steps`` run in order. A segment has ``segment`` >= 0 and lists the parameter ``gathers`` that
    must precede it. ``adapts`` is (origin, result) where a gradient flows back from result to
    origin; ``sends`` and ``receives`` are (value here, value there) across meshes.
    """

    block: int
    steps: list[Step]
    segment: int = -1
    gathers: tuple[Use, ...] = ()
    adapts: tuple[int, int] | None = None
    sends: tuple[int, int] | None = None
    receives: tuple[int, int] | None = None


@dataclass(slots=True)
class _OpenSegment:
    """A segment that is still growing. ``gathers`` are the parameters it needs brought together."""

    block: int
    scope: Scope
    recomputed: bool
    calls: list[Call] = field(default_factory=list[Call])
    produced: set[int] = field(default_factory=set[int])
    inputs: dict[int, None] = field(default_factory=dict[int, None])
    gathers: dict[int, Use] = field(default_factory=dict[int, Use])


Holdings = tuple[dict[Any, Any], dict[Any, Any], dict[Any, Any]]  # see ``Stage.holdings``


@dataclass(frozen=True, slots=True)
class Held:
    """The values of one tensor on this mesh, by gradient layout, and the one that was made first.

    It and its dicts are never changed, so that what a tensor had come to may be kept and compared.
    """

    origin: int
    by_pair: dict[tuple[Layout, Layout], int]
    by_layout: dict[Layout, int]

    def like(self, pair: Pair, trained: bool) -> int | None:
        """Return the value of these layouts; of what is not trained that of the gradient means nothing."""
        own = self.by_pair.get((pair.value, pair.gradient))
        return own if trained else self.by_layout.get(pair.value)


# What a mesh has come to hold of a tensor, for the step and for microbatches; of what enters likewise; with halos.
Entering = dict[tuple[Layout, Halos], int]
State = tuple[
    Held | None, Held | None, Entering | None, Entering | None, dict[tuple[int, Halos], int] | None
]

# Brings an activation from another mesh: (tensor, layout, receiving stage) -> value here, or -1.
Fetch = Callable[[int, Layout, "Stage"], int]


class Stage:
    """One mesh: its operators, and the values it has made so far."""

    def __init__(
        self,
        builder: ProgramBuilder,
        index: int,
        placed: list[Placements],
        parameters: Parameters,
        fetch: Fetch,
    ) -> None:
        self.builder = builder
        self.index = index
        self.prologue: list[Entry] = []
        self.forward: list[Entry] = []
        self.block = -1  # that of the last operator lowered here
        self._placed = placed
        self._visiting: dict[int, tuple[tuple[str, ...], Placements]] = {}
        self._parameters = parameters
        self._fetch = fetch
        self._held: dict[tuple[int, Scope], Held] = {}
        self._with_halos: dict[int, dict[tuple[int, Halos], int]] = {}
        self._entering: dict[tuple[int, Scope], dict[tuple[Layout, Halos], int]] = {}
        self._open: dict[Scope, _OpenSegment] = {}

    # -- operators -----------------------------------------------------------------------------

    def run(self, index: int, block: int, scope: Scope) -> None:
        """Lower one operator of the graph into this mesh's prologue or forward list."""
        builder = self.builder
        operator = builder.graph.operators[index]
        again = scope == "microbatch" and index in self.builder.recomputed
        if scope in self._open:
            opened = self._open[scope]
            ends = index in self.builder.segment_starts
            if ends or (opened.block, opened.recomputed) != (block, again):
                self._close(scope)
        self.block = block
        dims, pairs = self._config(index)
        gathers: dict[int, Use] = {}
        operands = [
            self._operand(index, position, pairs.inputs[position], scope, gathers)
            for position in range(len(operator.inputs))
        ]
        if scope not in self._open:
            self._open[scope] = _OpenSegment(block, scope, again)
        segment = self._open[scope]
        segment.gathers.update(gathers)
        results = [
            self._produce(tensor, pair, scope)
            for tensor, pair in zip(operator.outputs, pairs.outputs, strict=True)
        ]
        for value in operands:
            if value not in segment.produced:
                segment.inputs[value] = None
        segment.produced.update(results)
        segment.calls.append(
            builder.once(
                ("call", index, dims, tuple(operands), tuple(results)),
                partial(self._call, index, operands, results, scope),
            )
        )

    def _config(self, index: int) -> tuple[tuple[str, ...], Placements]:
        """Return an operator's dims and placements here.

        One that belongs to another mesh and is repeated here keeps the dims of the axes which both
        meshes have alike; along the others every device does the same work.
        """
        builder = self.builder
        config = builder.strategy.configs[index]
        own, here = builder.mesh(config.mesh), builder.mesh(self.index)
        if own is here or (own.axes, own.sizes) == (here.axes, here.sizes):
            return config.dims, self._placed[index]
        if index not in self._visiting:
            known = dict(zip(zip(own.axes, own.sizes, strict=True), config.dims, strict=True))
            dims = tuple([known.get(axis, "") for axis in zip(here.axes, here.sizes, strict=True)])
            self._visiting[index] = dims, placements(builder.iterations[index], dims)
        return self._visiting[index]

    def close(self) -> None:
        """End all open segments."""
        for scope in tuple(self._open):
            self._close(scope)

    def _close(self, scope: Scope) -> None:
        segment = self._open.pop(scope)
        trained = any(self.builder.values[value].gradient >= 0 for value in segment.produced)
        index = self.builder.add_segment(
            Segment(
                mesh=self.index,
                block=segment.block,
                calls=tuple(segment.calls),
                inputs=tuple(segment.inputs),
                outputs=tuple(sorted(segment.produced)),
                has_backward=trained and scope == "microbatch",
                recomputed=segment.recomputed,
            )
        )
        self.builder.external.update(segment.inputs)
        step = Step(Kind.FORWARD, index, f"compute:{self.index}", reads=tuple(segment.inputs))
        gathers = tuple(segment.gathers.values())
        self._entries(scope).append(Entry(segment.block, [step], index, gathers))

    def _entries(self, scope: Scope) -> list[Entry]:
        return self.prologue if scope == "step" else self.forward

    def _produce(self, tensor: int, pair: Pair, scope: Scope) -> int:
        builder, gradient = self.builder, -1
        if builder.graph.tensors[tensor].needs_gradient:
            gradient = builder.add_value(tensor, self.index, pair.gradient, scope, "gradient")
        value = builder.add_value(
            tensor, self.index, pair.value, scope, "activation", gradient=gradient
        )
        self._hold(tensor, scope, value, pair, is_origin=True)
        return value

    def _call(self, index: int, operands: list[int], results: list[int], scope: Scope) -> Call:
        builder = self.builder
        iteration, (dims, _) = builder.iterations[index], self._config(index)
        sizes = builder.mesh(self.index).sizes
        sample = builder.samples.operator_dim[index] if scope == "microbatch" else ""
        split = list(zip(dims, sizes, strict=True))
        split += [(sample, builder.strategy.pipeline.num_microbatches)] if sample else []
        pieces = math.prod(size for name, size in split if name in iteration.mean)
        summed = iteration.summed_axes(dims, sizes)
        return Call(
            operator=index,
            operands=tuple(operands),
            results=tuple(results),
            result_shapes=tuple(builder.values[value].shape for value in results),
            dims=dims,
            partial_axes=summed,
            once=iteration.once if summed else (),
            scale=1.0 / pieces,
            offset_dim=iteration.offset_dim(dims),
            unpadded=tuple(
                halo.dim for value in operands[:1] for halo in builder.values[value].halos
            ),
        )

    # -- operands ------------------------------------------------------------------------------

    def _operand(
        self, index: int, position: int, pair: Pair, scope: Scope, gathers: dict[int, Use]
    ) -> int:
        builder = self.builder
        tensor = builder.graph.operators[index].inputs[position]
        role = builder.graph.tensors[tensor].role
        if role == "parameter":
            use = self._parameters.use(self.index, tensor, pair)
            if use.source >= 0:
                gathers[use.value] = use
            return use.value
        if role != "activation":
            return self._read_outside(tensor, pair, scope)
        if scope == "microbatch" and (tensor, "step") in self._held:
            names = builder.iterations[index].inputs[position]
            sample = builder.samples.operator_dim[index]
            if sample == "" or sample not in names:
                return self._extended(self.acquire(tensor, pair, "step"), pair.halos, "step")
            if (tensor, "microbatch") not in self._held:
                self._cut(tensor, names.index(sample))
        return self._extended(self.acquire(tensor, pair, scope), pair.halos, scope)

    def _read_outside(self, tensor: int, pair: Pair, scope: Scope) -> int:
        """Return a value of a buffer, a constant or an input."""
        builder = self.builder
        if builder.graph.tensors[tensor].role == "input":
            of = "step" if builder.samples.tensor_dim[tensor] < 0 else scope
            return self._outside(tensor, pair.value, of, "input", pair.halos)
        value = self._outside(tensor, pair.value, "step", "buffer")
        return self._extended(value, pair.halos, scope)

    def _extended(self, value: int, halos: Halos, scope: Scope) -> int:
        """Return a value with its halos, bringing them dim by dim where they are not there yet."""
        builder = self.builder
        if not halos:
            return value
        tensor = builder.values[value].tensor
        if (value, halos) not in self._with_halos.get(tensor, {}):
            source = self._extended(value, halos[:-1], scope)
            self._break_before(source)
            entry, gradient = builder.values[source], -1
            if entry.gradient >= 0:
                layout = builder.values[entry.gradient].layout
                gradient = builder.add_value(
                    tensor, self.index, layout, scope, "gradient", halos=halos
                )
            result = builder.add_value(
                tensor, self.index, entry.layout, scope, "activation", halos=halos,
                gradient=gradient,
            )  # fmt: skip
            step = builder.exchange_halos(source, result, "activation")
            adapts = (source, result) if entry.gradient >= 0 else None
            self._entries(scope).append(Entry(self.block, [step], adapts=adapts))
            known = self._with_halos.get(tensor, {})
            self._with_halos[tensor] = {**known, (value, halos): result}
        return self._with_halos[tensor][value, halos]

    def _outside(
        self, tensor: int, layout: Layout, scope: Scope, role: str, halos: Halos = ()
    ) -> int:
        """Return what enters from outside; of the batch, every device may take what it likes."""
        if PARTIAL in layout:
            raise ValueError(f"tensor {tensor} enters from outside and cannot be a partial sum")
        known = self._entering.get((tensor, scope), {})
        if (layout, halos) not in known:
            kind = "input" if role == "input" else "buffer"
            value = self.builder.add_value(tensor, self.index, layout, scope, kind, halos=halos)
            if kind == "buffer":
                self.builder.lasting.append(value)
            known = self._entering[tensor, scope] = {**known, (layout, halos): value}
        return known[layout, halos]

    def _cut(self, tensor: int, dim: int) -> None:
        """Slice a tensor of the prologue into microbatches along ``dim``."""
        builder = self.builder
        builder.cut_dim.setdefault(tensor, dim)
        lying = builder.values[self._held[tensor, "step"].origin].layout
        layout = tuple(REPLICATE if p in (dim, PARTIAL) else p for p in lying)
        source = self.acquire(tensor, Pair(layout, layout), "step")
        self._break_before(source)
        value = builder.add_value(tensor, self.index, layout, "microbatch", "activation")
        message = Message(
            primitive="slice",
            mesh=self.index,
            axes=(),
            sources=(source,),
            results=(value,),
            dims=((-1, dim),),
            bytes=builder.bytes_of(value),
            purpose="activation",
        )
        self.forward.append(Entry(self.block, [builder.message_step(message)]))
        self._hold(tensor, "microbatch", value, Pair(layout, layout), is_origin=True)

    def acquire(self, tensor: int, pair: Pair, scope: Scope) -> int:
        """Return a value of an activation at a pair of layouts, writing messages where needed."""
        builder = self.builder
        if (tensor, scope) not in self._held:
            self._fetch_from_abroad(tensor, pair.value, scope)
        held = self._held[tensor, scope]
        trained = builder.graph.tensors[tensor].needs_gradient
        wanted = pair if trained else Pair(pair.value, pair.value)
        known = held.like(pair, trained)
        if known is not None:
            return known
        same = held.by_layout.get(pair.value, -1)
        self._break_before(held.origin)
        self._break_before(same)
        home = builder.values[held.origin].gradient if trained else -1
        if trained and builder.values[home].layout != wanted.gradient:
            home = builder.add_value(tensor, self.index, wanted.gradient, scope, "gradient")
        value = builder.add_value(
            tensor, self.index, pair.value, scope, "activation", alias=same, gradient=home
        )
        steps: list[Step] = []
        if same < 0:
            steps = builder.chain([(held.origin, value)], "activation")
        builder.external.add(held.origin if same < 0 else same)
        adapts = (held.origin, value) if trained else None
        self._entries(scope).append(Entry(self.block, steps, adapts=adapts))
        self._hold(tensor, scope, value, wanted)
        return value

    def _fetch_from_abroad(self, tensor: int, layout: Layout, scope: Scope) -> None:
        clean = tuple(REPLICATE if placement == PARTIAL else placement for placement in layout)
        value = self._fetch(tensor, clean, self) if scope == "microbatch" else -1
        if value < 0:
            name = self.builder.graph.tensors[tensor].name
            raise ValueError(f"tensor {name!r} is needed on mesh {self.index} before it exists")
        layout = self.builder.values[value].layout
        self._hold(tensor, scope, value, Pair(layout, layout), is_origin=True)

    def _hold(
        self, tensor: int, scope: Scope, value: int, pair: Pair, *, is_origin: bool = False
    ) -> None:
        held = self._held.get((tensor, scope)) or Held(-1, {}, {})
        self._held[tensor, scope] = Held(
            value if is_origin else held.origin,
            {**held.by_pair, (pair.value, pair.gradient): value},
            {pair.value: value, **held.by_layout},
        )

    def state(self, tensor: int) -> State:
        """Return all that this mesh has come to hold of a tensor; equal states mean equal values."""
        return (
            self._held.get((tensor, "step")),
            self._held.get((tensor, "microbatch")),
            self._entering.get((tensor, "step")),
            self._entering.get((tensor, "microbatch")),
            self._with_halos.get(tensor),
        )

    def holdings(self, tensors: Sequence[int]) -> Holdings:
        """Return what ``state`` says of several tensors, for ``resume``."""
        scopes: tuple[Scope, ...] = ("step", "microbatch")
        keys: list[tuple[int, Scope]] = [(tensor, scope) for tensor in tensors for scope in scopes]
        return (
            {key: self._held[key] for key in keys if key in self._held},
            {key: self._entering[key] for key in keys if key in self._entering},
            {one: self._with_halos[one] for one in tensors if one in self._with_halos},
        )

    def resume(self, holdings: Holdings) -> None:
        """Hold of tensors what ``holdings`` said."""
        self._held.update(holdings[0])
        self._entering.update(holdings[1])
        self._with_halos.update(holdings[2])

    def value_of(self, tensor: int, scope: Scope = "microbatch") -> int:
        """Return the value that this mesh made of an activation."""
        return self._held[tensor, scope].origin

    def has(self, tensor: int, scope: Scope) -> bool:
        """Whether this mesh already made or fetched an activation."""
        return (tensor, scope) in self._held or (tensor, scope) in self._entering

    def holds(self, tensor: int) -> bool:
        """Whether this mesh needs nothing more to read an activation."""
        return (tensor, "step") in self._held or (tensor, "microbatch") in self._held

    def _break_before(self, value: int) -> None:
        for scope, segment in tuple(self._open.items()):
            if value in segment.produced:
                self._close(scope)
