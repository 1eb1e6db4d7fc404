"""From graph and strategy to Program.

The order of work: find where gradients lie; lower every operator forward on its mesh; derive each
mesh's backward; add gradient synchronisation, update and the way back to rest; lay the templates
out for all microbatches in the schedule's order.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from shardwright.core.crossing import arrival
from shardwright.core.graph import OperatorGraph
from shardwright.core.layout import FLAT, PARTIAL, Layout, unflattened
from shardwright.core.program import Kind, Output, Program, Scope, Segment
from shardwright.core.strategy import Strategy
from shardwright.planner.cost.memory import SegmentMemory, viewed_inputs
from shardwright.planner.lower.assemble import assemble
from shardwright.planner.lower.backward import (
    Links,
    Transfers,
    backward_steps,
    forward_steps,
    insert_syncs,
)
from shardwright.planner.lower.builder import Finished, ProgramBuilder, Step
from shardwright.planner.lower.compile import Steps, Templates
from shardwright.planner.lower.gradients import place
from shardwright.planner.lower.parameters import Parameters
from shardwright.planner.lower.stage import Entry, Stage
from shardwright.planner.lower.wire import other_dtype, synchronise
from shardwright.planner.space.configs import Pair, Placements
from shardwright.planner.space.legal import (
    check_strategy,
    depend_on_parameters,
    meshes_of_operators,
)
from shardwright.planner.space.rules import iterate
from shardwright.planner.space.samples import Samples, State, find_samples


def lower(graph: OperatorGraph, strategy: Strategy, samples: Samples | None = None) -> Program:
    """Return the Program of one training step.

    ``samples`` may be passed to save its analysis when many strategies of one graph are lowered.
    Raises InputError where the strategy is not legal for the graph (``planner.space.legal``).
    """
    samples = samples or find_samples(graph)
    check_strategy(graph, strategy, samples)
    iterations = [iterate(graph, index) for index in range(len(graph.operators))]
    placed = place(graph, strategy, samples, iterations)
    return Lowering(ProgramBuilder(graph, strategy, samples, iterations), placed).run()


class Lowering:
    """One strategy on its way to a Program; blocks of operators are lowered one after another."""

    def __init__(self, builder: ProgramBuilder, placed: list[Placements]) -> None:
        self.builder = builder
        self.placed = placed
        self.parameters = Parameters(builder)
        self.stages = [
            Stage(builder, index, placed, self.parameters, self._fetch)
            for index in range(len(builder.strategy.meshes))
        ]
        once, graph = builder.once, builder.graph
        self.writes = once("writes", lambda: _writes_or_reads_written(graph))
        self.trained = once("trained", lambda: depend_on_parameters(graph))
        meshes = (
            [config.mesh for config in builder.strategy.configs] if len(self.stages) > 1 else []
        )
        self.where = once(("where", *meshes), self._meshes_of_operators)
        self.exchange: list[list[Step]] = [[] for _ in self.stages]

    def run(self) -> Program:
        """Lower everything."""
        loss = self.lower_blocks()
        return assemble(self.builder, self.templates(), loss)

    def lower_blocks(self) -> int:
        """Lower all blocks forward; return the value of the loss."""
        graph, builder = self.builder.graph, self.builder
        for number in range(len(graph.blocks)):
            self.lower_block(number)
        self._move_tied_parameters()
        loss_mesh = builder.strategy.configs[graph.tensors[graph.loss].producer].mesh
        loss = self.stages[loss_mesh].value_of(graph.loss)
        builder.external.add(loss)
        builder.outputs = self._outputs()
        builder.external.update(output.value for output in builder.outputs)
        return loss

    # -- forward -------------------------------------------------------------------------------

    def lower_block(self, number: int) -> None:
        """Lower the operators of one block forward; its segments end with it."""
        block = self.builder.graph.blocks[number]
        self.builder.make_for(number)
        self.lower_operators(block.start, block.stop, number)
        self.close()

    def lower_operators(self, start: int, stop: int, block: int) -> None:
        """Lower some operators of a block."""
        for index in range(start, stop):
            for scope in self._scopes(index):
                for mesh in sorted(self.where[index]):
                    self.stages[mesh].run(index, block, scope)

    def close(self) -> None:
        """End a block and its segments."""
        for stage in self.stages:
            stage.close()
        self.builder.make_for(None)

    def _meshes_of_operators(self) -> list[set[int]]:
        return meshes_of_operators(self.builder.graph, self.builder.strategy.configs, self.trained)

    def _scopes(self, index: int) -> tuple[Scope, ...]:
        graph, samples = self.builder.graph, self.builder.samples
        outputs = graph.operators[index].outputs
        if index in samples.prologue:
            # Pieces of what carries samples may be wanted too; a sum is only wanted whole.
            also = samples.operator_dim[index] != "" and any(
                samples.state[tensor] is State.SPLIT
                and not samples.prologue.issuperset(graph.consumers[tensor])
                for tensor in outputs
            )
            return ("step", "microbatch") if also else ("step",)
        is_free = all(samples.state[tensor] is State.FREE for tensor in outputs)
        if (
            is_free
            and not self.writes[index]
            and not any(graph.tensors[tensor].needs_gradient for tensor in outputs)
        ):
            trained = any(
                graph.tensors[t].role == "parameter" for t in graph.operators[index].inputs
            )
            return ("microbatch",) if trained or self._reads_microbatch(index) else ("step",)
        return ("microbatch",)

    def _reads_microbatch(self, index: int) -> bool:
        inputs = self.builder.graph.operators[index].inputs
        return any(stage.has(t, "microbatch") for stage in self.stages for t in inputs)

    def _fetch(self, tensor: int, wanted: Layout, stage: Stage) -> int:
        """Bring an activation from the mesh that makes it, once per microbatch.

        Between meshes of equal sizes it is brought into the wanted layout first and travels between
        equal coordinates. Otherwise it is sent from where it lies and arrives in shards, so that
        every element travels once.
        """
        builder = self.builder
        producer = builder.graph.tensors[tensor].producer
        home = self.stages[builder.strategy.configs[producer].mesh]
        if home is stage or not home.has(tensor, "microbatch"):
            return -1
        home.close()
        shape = builder.whole_shape(tensor, "microbatch")
        leaving = layout = wanted
        here, there = builder.mesh(home.index), builder.mesh(stage.index)
        if here.sizes != there.sizes:
            lying = builder.values[home.value_of(tensor)].layout
            leaving = arrival(shape, lying, here.sizes) if PARTIAL in lying else lying
            layout = arrival(shape, wanted, there.sizes)
        value = home.acquire(tensor, Pair(leaving, leaving), "microbatch")
        gradient = -1
        if builder.graph.tensors[tensor].needs_gradient:
            gradient = builder.add_value(tensor, stage.index, layout, "microbatch", "gradient")
        copy = builder.add_value(
            tensor, stage.index, layout, "microbatch", "activation", gradient=gradient
        )
        send, receive = builder.transfer(value, copy, "activation")
        home.forward.append(Entry(-1, [send], sends=(value, copy)))
        stage.forward.append(Entry(-1, [receive], receives=(value, copy)))
        return copy

    def _move_tied_parameters(self) -> None:
        """Send a parameter used on several meshes from its home, and its gradients back.

        The gradient is summed up over the mesh it was made on first, in the optimizer's layout where
        that mesh has one like it, and then added to the reduced gradient at home.
        """
        builder = self.builder
        builder.make_for("moved parameters")
        for use in list(self.parameters.uses.values()) if len(self.stages) > 1 else ():
            kept, value = self.parameters.kept[use.tensor], builder.values[use.value]
            if use.mesh == kept.mesh:
                continue
            if value.alias < 0:
                origin, gather = builder.once(("whole", kept.rest), partial(self._whole, kept.rest))
                ends = (origin, use.value)
                send, receive = builder.once(
                    ("tied", *ends), partial(builder.transfer, *ends, "parameter")
                )
                self.stages[kept.mesh].prologue.append(Entry(-1, [*gather, send]))
                self.stages[use.mesh].prologue.append(Entry(-1, [receive]))
            if value.gradient >= 0:
                summed = self.parameters.summed_abroad(use)
                arrived, cut = builder.once(
                    ("arrived", summed, kept.reduced), partial(self._arrived, summed, kept.reduced)
                )
                ends = (summed, arrived)
                send, receive = builder.once(
                    ("tied", *ends), partial(builder.transfer, *ends, "synchronise")
                )
                self.exchange[use.mesh].append(send)
                self.exchange[kept.mesh] += [receive, *cut]
        builder.make_for(None)

    def _whole(self, rest: int) -> tuple[int, list[Step]]:
        """Return the value that a parameter leaves its home from, and the steps that make it: flat
        shards are gathered first, since no other mesh is cut as they are."""
        builder, value = self.builder, self.builder.values[rest]
        if FLAT not in value.layout:
            return rest, []
        whole = builder.add_value(
            value.tensor, value.mesh, unflattened(value.layout), "step", "parameter"
        )
        return whole, builder.chain([(rest, whole)], "parameter")

    def _arrived(self, summed: int, reduced: int) -> tuple[int, list[Step]]:
        """Return where a gradient arrives from another mesh, and the steps that add it to the
        reduced one: at once, except in another dtype, or to flat shards on a mesh that is cut otherwise."""
        builder, one, other = (
            self.builder,
            self.builder.values[summed],
            self.builder.values[reduced],
        )
        same = builder.mesh(one.mesh).sizes == builder.mesh(other.mesh).sizes
        wire = other_dtype(builder, summed)
        is_cut = FLAT in other.layout and not (same and one.layout == other.layout)
        if not is_cut and wire in ("", other.dtype):
            return reduced, []
        layout = unflattened(other.layout) if is_cut else other.layout
        arrived = builder.add_value(
            other.tensor, other.mesh, layout, "step", "gradient", dtype=wire or other.dtype
        )
        return arrived, synchronise(builder, [(arrived, reduced)])

    # -- backward and update -------------------------------------------------------------------

    def templates(self) -> list[Templates]:
        """Return every stage's templates, with all segments finished."""
        return [Templates.of(self.builder, steps) for steps in self.steps()]

    def steps(self) -> list[Steps]:
        """Return every stage's steps, with all segments finished."""
        every = self._steps()
        self._finish_segments()
        return every

    def _steps(self) -> list[Steps]:
        builder = self.builder
        transfers: Transfers = {}
        backward = [self._backward(stage, transfers) for stage in reversed(self.stages)][::-1]
        return [
            Steps(
                prologue=forward_steps(builder, stage.prologue),
                forward=forward_steps(builder, stage.forward),
                backward=backward[stage.index],
                exchange=self.exchange[stage.index],
                epilogue=self.epilogue(stage.index),
            )
            for stage in self.stages
        ]

    def _backward(self, stage: Stage, transfers: Transfers) -> list[Step]:
        steps = backward_steps(self.builder, stage, transfers)
        links = Links.of(self.builder, stage.forward, steps)
        return insert_syncs(self.builder, steps, self._pending_on(stage.index), links)

    def _pending_on(self, mesh: int) -> dict[int, int]:
        values = self.builder.values
        return {s: t for s, t in self.parameters.pending.items() if values[s].mesh == mesh}

    def epilogue(self, mesh: int) -> list[Step]:
        """Return the steps that update the parameters of a mesh and bring them back to rest."""
        builder = self.builder
        steps: list[Step] = []
        kept = [k for k in self.parameters.kept.values() if k.mesh == mesh and k.reduced >= 0]
        reduced = tuple(k.reduced for k in kept)
        if builder.strategy.clips or builder.strategy.precision == "float16":
            steps.append(Step(Kind.CLIP, -1, f"compute:{mesh}", reads=reduced))
        masters = tuple(k.master for k in kept)
        steps.append(Step(Kind.UPDATE, -1, f"compute:{mesh}", reads=reduced, writes=masters))
        return steps + self._back_to_rest(mesh)

    def _outputs(self) -> tuple[Output, ...]:
        """Find what is reported: whole where the prologue makes it, else per microbatch."""
        graph, samples = self.builder.graph, self.builder.samples
        found: list[Output] = []
        for name, tensor in graph.outputs:
            home = self.builder.strategy.configs[graph.tensors[tensor].producer].mesh
            scopes: tuple[Scope, ...] = ("step", "microbatch")
            stages = (self.stages[home], *self.stages)
            stage = next(s for s in stages if any(s.has(tensor, scope) for scope in scopes))
            scope: Scope = "step" if stage.has(tensor, "step") else "microbatch"
            in_pieces = scope == "microbatch"
            found.append(
                Output(
                    name=name,
                    value=stage.value_of(tensor, scope),
                    along=samples.tensor_dim[tensor] if in_pieces else -1,
                    adds=in_pieces and samples.state[tensor] is State.SUM,
                )
            )
        return tuple(found)

    def _back_to_rest(self, mesh: int) -> list[Step]:
        """Return the messages that bring updated parameters to rest, in the order of forward."""
        builder = self.builder
        block_of = {
            i: n for n, b in enumerate(builder.graph.blocks) for i in range(b.start, b.stop)
        }
        groups: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
        for kept in self.parameters.kept.values():
            if kept.mesh != mesh or kept.master == kept.rest:
                continue
            block = block_of[builder.graph.consumers[kept.tensor][0]]
            key = (block, *builder.signature(kept.master, builder.values[kept.rest].layout))
            groups.setdefault(key, []).append((kept.master, kept.rest))
        return [
            step
            for _, pairs in sorted(groups.items(), key=lambda group: group[0][0])
            for step in builder.once(
                ("back to rest", *pairs), partial(builder.chain, pairs, "parameter")
            )
        ]

    # -- finishing -----------------------------------------------------------------------------

    def _finish_segments(self) -> None:
        """Keep only the outputs somebody reads, and measure what each segment saves."""
        for stage in self.stages:
            for entry in (*stage.prologue, *stage.forward):
                if entry.segment >= 0:
                    self.builder.take(entry.segment, self.finish(entry.segment))

    def finish(self, number: int) -> Finished:
        """Return a segment with only the outputs that somebody reads."""
        builder = self.builder
        segment = builder.segments[number]
        outputs = tuple([v for v in segment.outputs if v in builder.external])
        return builder.once(
            ("finish", number, outputs, segment.rematerialised, segment.unused_in_backward),
            partial(self._finish, segment, outputs),
        )

    def _finish(self, segment: Segment, outputs: tuple[int, ...]) -> Finished:
        graph, values = self.builder.graph, self.builder.values
        memory = SegmentMemory(graph, segment.calls, values, segment.inputs)
        kept, temporary = memory.bytes(outputs, segment.has_backward)
        bare = memory.bytes(outputs, False)[1][0] if segment.recomputed else 0
        told = {*segment.rematerialised, *segment.unused_in_backward}
        idle = [v for v in memory.idle_inputs() if v not in told] if segment.has_backward else []
        finished = replace(
            segment,
            outputs=outputs,
            unused_in_backward=(*segment.unused_in_backward, *idle),
            saved_bytes=kept,
            temporary_bytes=temporary,
            bare_bytes=bare,
        )
        views = viewed_inputs(graph, finished, values)
        return Finished(finished, memory.kept(outputs), views)


def _writes_or_reads_written(graph: OperatorGraph) -> list[bool]:
    """Say which operators write a buffer or depend on one that is written.

    They run in every microbatch: a counter counts calls of forward, as with gradient accumulation.
    """
    written = {
        tensor
        for operator in graph.operators
        if not operator.outputs
        for tensor in operator.inputs
        if graph.tensors[tensor].role == "buffer"
    }
    result: list[bool] = []
    for operator in graph.operators:
        result.append(not operator.outputs or not written.isdisjoint(operator.inputs))
        if result[-1]:
            written.update(operator.outputs)
    return result
