"""How a block stands: all that lowering it rests on, in no numbers but its own.

Values and meshes are numbered as they are met, in one order. Where two blocks stand alike, what one met
first is for the other what that met first, and what one makes the other makes in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import methodcaller
from typing import Any, Protocol

from shardwright.planner.lower.alike import Alike
from shardwright.planner.lower.builder import ProgramBuilder
from shardwright.planner.lower.parameters import Parameters
from shardwright.planner.lower.records import Record
from shardwright.planner.lower.stage import Stage
from shardwright.planner.space.configs import Placements


class Lowers(Protocol):
    """What lowers blocks, and notes what that did."""

    builder: ProgramBuilder
    stages: list[Stage]
    placed: list[Placements]
    where: list[set[int]]
    parameters: Parameters

    def record(
        self, leaves: Sequence[int], rests_on: tuple[object, ...], act: Callable[[], None]
    ) -> Record:
        """Lower a block by ``act``, and note all that this did."""
        ...


class Standing:
    """How a block stands, and the values and meshes that it met, in order; behind them those values that it
    made."""

    def __init__(self, builder: ProgramBuilder, block: Alike) -> None:
        self.builder, self.block = builder, block
        self.values: dict[int, int] = {}
        self.meshes: dict[int, int] = {}
        self.place = {tensor: at for at, tensor in enumerate(block.tensors)}
        self._facts: list[object] = []

    def said(self, lowering: Lowers) -> tuple[object, ...]:
        """Return all that lowering the block rests on, in no numbers but its own."""
        around, stages = self.block.around, lowering.stages
        where = lowering.where[around.start : around.stop]
        runs = {tuple(sorted(meshes)) for meshes in where}
        spots = [[self.mesh(mesh) for mesh in run] for run in (runs if len(runs) == 1 else where)]
        on = [stages[mesh] for mesh in dict.fromkeys(mesh for run in runs for mesh in run)]
        found = (
            spots,
            self._operators(lowering.placed),
            self._parameters(lowering.parameters),
            [self._used(lowering.parameters, tensor) for tensor in around.shared],
            [self._found(tensor, stages, on) for tensor in around.finds],
        )
        return *found, self._facts, self._met()

    def _operators(self, placed: Sequence[Placements]) -> object:
        """Return what a strategy says of the operators."""
        builder, start, stop = self.builder, self.block.around.start, self.block.around.stop
        configs = builder.strategy.configs[start:stop]
        homes = {config.mesh for config in configs}
        return (
            [config.dims for config in configs],
            [self.mesh(mesh) for mesh in (homes if len(homes) == 1 else [c.mesh for c in configs])],
            [placed[index] for index in self.block.sampleless],
            self._among(builder.recomputed),
            self._among(builder.segment_starts),
        )

    def _among(self, chosen: frozenset[int]) -> list[int]:
        """Return the places of operators among some chosen ones."""
        start, stop = self.block.around.start, self.block.around.stop
        return [index - start for index in range(start, stop) if index in chosen]

    def _parameters(self, parameters: Parameters) -> object:
        """Return what a strategy says of the parameters; of those of the block it is all that there is."""
        around, found = self.block.around, list[object]()
        for tensor in around.parameters:
            kept = parameters.kept[tensor]
            for value in (kept.rest, kept.master, kept.reduced):
                if tensor in around.shared:
                    self.value(value)
                elif value >= 0:
                    self.values.setdefault(value, len(self.values))
            found.append(
                (parameters.config_of[tensor], parameters.is_often(kept), self.mesh(kept.mesh))
            )
        return found

    def _found(self, tensor: int, stages: Sequence[Stage], on: Sequence[Stage]) -> object:
        """Return what there is of a tensor ``on`` the meshes of the block, and where it comes from."""
        builder = self.builder
        found: list[object] = [
            any(stage.has(tensor, "microbatch") for stage in stages),
            builder.cut_dim.get(tensor),
        ]
        producer = builder.graph.tensors[tensor].producer
        if producer >= 0 and not all(map(methodcaller("holds", tensor), on)):
            # It is sent from its home, by the block that was the last one there.
            on = [*on, stages[builder.strategy.configs[producer].mesh]]
            found.append(self.block.number - on[-1].block)
        return [*found, *[(self.mesh(stage.index), self._held(stage, tensor)) for stage in on]]

    def local(self, values: Iterable[int]) -> tuple[int, ...]:
        """Return values that the block has met or made by its own numbers."""
        return tuple([self.values[value] for value in values])

    def add(self, made: Iterable[int]) -> None:
        """Number values that the block made."""
        for value in made:
            self.values[value] = len(self.values)

    def mesh(self, index: int) -> int:
        """Return the number of a mesh in the order in which they are met."""
        return self.meshes.setdefault(index, len(self.meshes))

    def value(self, index: int) -> int:
        """Return the number of a value likewise; what it is is noted when it is met."""
        if index < 0:
            return -1
        known = self.values.get(index)
        if known is None:
            known = self.values[index] = len(self.values)
            one = self.builder.values[index]
            self._facts.append(
                (
                    self.place.get(one.tensor, one.tensor), self.mesh(one.mesh), one.layout, one.shape,
                    one.dtype, one.scope, one.role, one.resident, one.halos,
                    self.value(one.gradient), self.value(one.alias),
                )
            )  # fmt: skip
        return known

    def _used(self, parameters: Parameters, tensor: int) -> object:
        """Return what other blocks have come to use a parameter as."""
        uses = [
            (self.mesh(mesh), layouts, self.value(use.value), self.value(use.source))
            for (mesh, used, *layouts), use in parameters.uses.items()
            if used == tensor
        ]
        return uses, parameters.kept[tensor].rest in parameters.taken

    def _held(self, stage: Stage, tensor: int) -> object:
        """Return what a mesh has come to hold of a tensor."""
        *both, fixed, cut, halos = stage.state(tensor)
        number = self.value
        return (
            [
                held and (number(held.origin), self._all(held.by_pair), self._all(held.by_layout))
                for held in both
            ],
            self._all(fixed or {}),
            self._all(cut or {}),
            [(number(of), how, number(one)) for (of, how), one in (halos or {}).items()],
        )

    def _all(self, values: Mapping[Any, int]) -> object:
        return [(how, self.value(value)) for how, value in values.items()]

    def _met(self) -> object:
        """Return what of the meshes matters: their axes, and between them who shares devices and links.

        What travels between meshes of unlike sizes goes by their devices.
        """
        builder, met = self.builder, list(self.meshes)
        meshes = [builder.mesh(index) for index in met]
        shapes = [(mesh.axes, mesh.sizes) for mesh in meshes]
        links = [builder.links[index] for index in met]
        alike = [links.index(link) for link in links]
        devices = [mesh.devices for mesh in meshes]
        same = [devices.index(one) for one in devices]
        return shapes, alike, same, met if len({mesh.sizes for mesh in meshes}) > 1 else ()
