"""Gradients of one compressor that travel together, and what is made for them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from shardwright.core.compression import packed_bytes, wide_dtype
from shardwright.core.graph import Constant
from shardwright.core.program import Message, Primitive, Transform, TransformName, ValueRole
from shardwright.core.strategy import GradientSync
from shardwright.planner.lower.builder import Extra, ProgramBuilder, Step

Pair = tuple[int, int]


def sync_of(builder: ProgramBuilder, gradient: int) -> GradientSync:
    """Return how a gradient travels."""
    return builder.strategy.gradient_sync.of(builder.values[gradient].tensor)


@dataclass(frozen=True, slots=True)
class Lot:
    """Gradients ``sources`` whose sums over ``axes``, of so many ``ranks``, are to be ``results``.

    There is a residual for each where what is lost is kept, and a velocity where momentum runs before the
    selection. ``wide``: the dtype in which gradients are compressed.
    """

    builder: ProgramBuilder
    sources: tuple[int, ...]
    results: tuple[int, ...]
    axes: tuple[int, ...]
    ranks: int
    last_only: bool

    @classmethod
    def of(cls, builder: ProgramBuilder, pairs: Sequence[Pair], last_only: bool) -> Lot:
        """Return the lot of (source, result) pairs that are summed over the same axes."""
        first = builder.values[pairs[0][0]]
        (change,) = builder.reshard(pairs[0][0], builder.values[pairs[0][1]].layout)
        ranks = math.prod([builder.mesh(first.mesh).sizes[axis] for axis in change.axes])
        sources, results = (tuple([pair[end] for pair in pairs]) for end in (0, 1))
        return cls(builder, sources, results, change.axes, ranks, last_only)

    @property
    def mesh(self) -> int:
        """The mesh on which they lie."""
        return self.builder.values[self.sources[0]].mesh

    @property
    def sync(self) -> GradientSync:
        """How they travel, but for densities."""
        return sync_of(self.builder, self.sources[0])

    @property
    def wide(self) -> str:
        """The dtype in which they are compressed."""
        return wide_dtype(self.builder.values[self.sources[0]].dtype)

    @property
    def residuals(self) -> tuple[int, ...]:
        """What this device owes."""
        if self.sync.feedback.residual == "none":
            return ()
        return tuple([residual_of(self.builder, source) for source in self.sources])

    @property
    def velocities(self) -> tuple[int, ...]:
        """What runs on of gradients before."""
        if not self.sync.feedback.momentum:
            return ()
        return tuple([residual_of(self.builder, source, "velocity") for source in self.sources])

    @property
    def pack_bytes(self) -> list[int]:
        """The bytes that a device sends of each at once."""
        found = list[int]()
        for source in self.sources:
            how, count = sync_of(self.builder, source), math.prod(self.builder.values[source].shape)
            found.append(packed_bytes(how.compressor, how.density, count, self.wide))
        return found

    def packs(self) -> tuple[int, ...]:
        """Return new values for what a device sends of each."""
        return self.bytes_values(self.pack_bytes, 0)

    def bytes_values(self, sizes: Sequence[int], placement: int) -> tuple[int, ...]:
        """Return new values of so many bytes that stand for gradients on their way over the axes."""
        return tuple(
            [
                self.value(source, (size,), placement, dtype="uint8")
                for source, size in zip(self.sources, sizes, strict=True)
            ]
        )

    def value(self, source: int, shape: tuple[int, ...], placement: int, dtype: str = "") -> int:
        """Return a new value of a shape that stands for a gradient, placed so over the axes."""
        entry = self.builder.values[source]
        layout = tuple(
            [placement if axis in self.axes else old for axis, old in enumerate(entry.layout)]
        )
        return self.builder.add_value(
            entry.tensor,
            entry.mesh,
            layout,
            "step",
            "gradient",
            dtype=dtype or self.wide,
            shape=shape,
        )

    def pack_constants(self) -> dict[str, Constant]:
        """Return what packing goes by besides the form of what it writes; nothing where that is as ever."""
        feedback, found = self.sync.feedback, dict[str, Constant]()
        states = (feedback.residual != "none") + bool(feedback.momentum)
        if states != 1:
            found["states"] = states
        if feedback.momentum:
            found |= {"momentum": feedback.momentum, "masked": int(feedback.masked)}
        if feedback.local_norm:
            found["bound"] = feedback.local_norm / math.sqrt(self.ranks * self._trained())
        return found

    def _trained(self) -> int:
        """Return the elements of all trained parameters, by whose share each is bounded."""
        graph = self.builder.graph
        trained = [graph.tensors[one] for one in graph.parameters]
        return sum(one.numel for one in trained if one.needs_gradient)

    def transform(
        self,
        name: TransformName,
        reads: tuple[int, ...],
        writes: tuple[int, ...],
        states: tuple[int, ...] = (),
        seen: tuple[int, ...] = (),
        said: Mapping[str, Constant] = MappingProxyType({}),
    ) -> Step:
        """Return the step of a transform that also reads and writes states, or has only ``seen`` them;
        ``said`` are its constants."""
        transform = Transform(
            name=name,
            mesh=self.mesh,
            reads=(*reads, *seen, *states),
            writes=(*writes, *states),
            purpose="synchronise",
            constants=tuple(said.items()),
        )
        return self.builder.transform_step(transform, reads, writes, last_only=self.last_only)

    def message(
        self,
        primitive: Primitive,
        sources: tuple[int, ...],
        results: tuple[int, ...],
        num_bytes: int,
        dims: tuple[int, int] = (-1, -1),
        pairs: tuple[tuple[int, int], ...] = (),
    ) -> Step:
        """Return the step of a message over the axes; see ``core.program.Message``."""
        message = Message(
            primitive=primitive,
            mesh=self.mesh,
            axes=self.axes,
            sources=sources,
            results=results,
            dims=(dims,) * len(sources),
            bytes=num_bytes,
            purpose="synchronise",
            pairs=pairs,
        )
        return self.builder.message_step(message, last_only=self.last_only)


def residual_of(builder: ProgramBuilder, gradient: int, role: ValueRole = "state") -> int:
    """Return a state of a parameter's gradients of one layout: whatever bucket they travel in."""
    one = builder.values[gradient]
    packs = sync_of(builder, gradient).compressor != "none"
    dtype = wide_dtype(one.dtype) if packs else one.dtype
    return state_of(builder, gradient, role, dtype)


def state_of(
    builder: ProgramBuilder,
    like: int,
    role: ValueRole,
    dtype: str,
    shape: tuple[int, ...] = (),
) -> int:
    """Return a state that belongs to the parameter, the mesh and the layout of a value."""
    one = builder.values[like]
    key = (one.tensor, one.mesh, one.layout, dtype, role, shape)
    if key not in builder.residuals:
        extra: Extra = {"dtype": dtype, "resident": True}
        if shape:
            extra["shape"] = shape
        builder.residuals[key] = builder.add_value(*key[:3], "step", role, **extra)
    return builder.residuals[key]
