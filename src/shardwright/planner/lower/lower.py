"""From graph and strategy to Program.

The order of work: find where gradients lie; lower every operator forward on its mesh; derive each
mesh's backward; add gradient synchronisation, update and the way back to rest; lay the phases
out for all microbatches in the schedule's order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any

from shardwright.core.crossing import arrival
from shardwright.core.graph import OperatorGraph
from shardwright.core.layout import PARTIAL, Layout
from shardwright.core.program import Kind, Output, Program, Scope
from shardwright.core.strategy import Strategy
from shardwright.operators.splitting.samples import Samples, State, find_samples
from shardwright.planner.lower.alike import is_cut
from shardwright.planner.lower.assemble import assemble
from shardwright.planner.lower.backward import Prefetched
from shardwright.planner.lower.blocks import Blocks
from shardwright.planner.lower.builder import ProgramBuilder, Step
from shardwright.planner.lower.compile import Phases, phases_of
from shardwright.planner.lower.flushless import flushless
from shardwright.planner.lower.gradients import place
from shardwright.planner.lower.ground import Ground
from shardwright.planner.lower.link import Linker
from shardwright.planner.lower.parameters import Kept, Parameters
from shardwright.planner.lower.pieces import Piece, Share, joined
from shardwright.planner.lower.records import Record, since
from shardwright.planner.lower.serve import Push, serve, with_pushes
from shardwright.planner.lower.stage import Entry, Stage
from shardwright.planner.lower.template import Rows
from shardwright.planner.lower.tied import move_tied
from shardwright.planner.lower.transfers import transfer
from shardwright.planner.lower.updates import with_updates
from shardwright.planner.space.configs import Pair, Placements
from shardwright.planner.space.legal import (
    check_strategy,
    meshes_of_operators,
)

# Steps that touch all parameters, each alone, and the messages that bring these to rest: blocks, and theirs.
Epilogue = tuple[list[Rows], tuple[list[int], list[list[Rows]]]]


def lower(
    graph: OperatorGraph,
    strategy: Strategy,
    samples: Samples | None = None,
    ground: Ground | None = None,
) -> Program:
    """Return the Program of one training step, or of a period where the pipeline is never flushed.

    ``samples``, or all ``ground``, may be passed to save its analysis when many strategies of one graph
    are lowered. Raises InputError where the strategy is not legal for the graph (``planner.space.legal``).
    """
    ground = ground or Ground(graph, samples or find_samples(graph))
    check_strategy(graph, strategy, ground.samples)
    placed = place(graph, strategy, ground.samples, ground.iterations)
    return flushless(Lowering(ProgramBuilder(ground, strategy), placed).run())


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
        meshes = (
            [config.mesh for config in builder.strategy.configs] if len(self.stages) > 1 else []
        )
        self.where = builder.once(("where", *meshes), self._meshes_of_operators)
        self.exchange: list[list[Step]] = [[] for _ in self.stages]
        self.pushes: list[Push] = []
        self.blocks: list[Record] = []
        self.late: set[int] = set()  # parameters with gradients pending that no block notes
        self.links = builder.once("links", partial(Linker, builder))

    def run(self) -> Program:
        """Lower everything."""
        loss = self.lower_blocks()
        return assemble(self.builder, self.phases(), loss)

    def lower_blocks(self) -> int:
        """Lower all blocks forward; return the value of the loss."""
        graph, builder = self.builder.graph, self.builder
        for number in range(len(graph.blocks)):
            self.lower_block(number)
        noted = len(self.parameters.pending)
        move_tied(self.parameters, self.stages, self.exchange)
        self.late = {
            self.builder.values[v].tensor for v in islice(self.parameters.pending, noted, None)
        }
        self.pushes = serve(self.parameters, self.stages)
        loss_mesh = builder.strategy.configs[graph.tensors[graph.loss].producer].mesh
        loss = self.stages[loss_mesh].value_of(graph.loss)
        builder.external.add(loss)
        builder.outputs = self._outputs()
        builder.external.update(output.value for output in builder.outputs)
        return loss

    # -- forward -------------------------------------------------------------------------------

    def lower_block(self, number: int) -> None:
        """Lower the operators of one block forward."""
        self.blocks.append(self.lowered(number, ()))

    def lowered(self, number: int, rests_on: tuple[object, ...]) -> Record:
        """Lower a block, or do what was done for one that stands alike."""
        ground, act = self.builder.ground, partial(self.lower_anew, number)
        block = ground.alike[number]
        if block is None:
            return self.record(ground.blocks[number].leaves, rests_on, act)
        return self.links.lower(self, block, rests_on, act)

    def lower_anew(self, number: int) -> None:
        """Lower the operators of one block forward; its segments end with it."""
        block = self.builder.graph.blocks[number]
        self.builder.make_for(number)
        for index in range(block.start, block.stop):
            for scope in self._scopes(index):
                for mesh in sorted(self.where[index]):
                    self.stages[mesh].run(index, number, scope)
        for stage in self.stages:
            stage.close()
        self.builder.make_for(None)

    def record(
        self, leaves: Sequence[int], rests_on: tuple[object, ...], act: Callable[[], None]
    ) -> Record:
        """Lower a block, and note all that this did."""
        builder, parameters = self.builder, self.parameters
        sizes = [(len(stage.prologue), len(stage.forward)) for stage in self.stages]
        segments, pending = len(builder.begun), len(parameters.pending)
        lasting, turned = len(builder.lasting), len(builder.turned)
        uses, first_uses = len(parameters.uses), len(parameters.first_uses)
        taken, cuts = len(parameters.taken), len(builder.cut_dim)
        external, builder.external = builder.external, set()
        act()
        found, builder.external = frozenset(builder.external), external
        builder.external |= found
        begun = builder.begun[segments:]
        return Record(
            rests_on=rests_on,
            entries=tuple(
                [
                    (stage.prologue[first:], stage.forward[second:])
                    for stage, (first, second) in zip(self.stages, sizes, strict=True)
                ]
            ),
            segments=tuple(begun),
            pending=tuple(islice(parameters.pending.items(), pending, None)),
            blocks=tuple([stage.block for stage in self.stages]),
            leaves=tuple([stage.holdings(leaves) for stage in self.stages]),
            uses=since(parameters.uses, uses),
            first_uses=since(parameters.first_uses, first_uses),
            taken=since(parameters.taken, taken),
            turned=tuple(builder.turned[turned:]),
            external=found,
            lasting=tuple(builder.lasting[lasting:]),
            cuts=since(builder.cut_dim, cuts),
            known={},
            made=frozenset([value for _, one in begun for value in one.outputs]),
        )

    def repeat(self, record: Record) -> None:
        """Do what a record says was done."""
        builder, parameters = self.builder, self.parameters
        for number, stage in enumerate(self.stages):
            prologue, forward = record.entries[number]
            stage.prologue += prologue
            stage.forward += forward
            stage.block = record.blocks[number]
            stage.resume(record.leaves[number])
        builder.begun += record.segments
        for index, segment in record.segments:
            builder.segments[index] = segment
        parameters.uses.update(record.uses)
        parameters.first_uses.update(record.first_uses)
        parameters.pending.update(record.pending)
        parameters.taken.update(record.taken)
        builder.turn(record.turned)
        builder.external |= record.external
        builder.lasting += record.lasting
        builder.cut_dim.update(record.cuts)

    def _meshes_of_operators(self) -> list[set[int]]:
        return meshes_of_operators(
            self.builder.graph, self.builder.strategy.configs, self.builder.ground.trained
        )

    def _scopes(self, index: int) -> tuple[Scope, ...]:
        graph, samples = self.builder.graph, self.builder.samples
        outputs = graph.operators[index].outputs
        if index in samples.prologue:
            # Pieces of what carries samples may be wanted too; a sum is only wanted whole.
            also = samples.operator_dim[index] != "" and is_cut(graph, samples, outputs)
            both: tuple[Scope, ...] = ("step", "microbatch")
            return both[: 1 + also]
        if index not in self.builder.ground.fixed or self._reads_microbatch(index):
            return ("microbatch",)
        return ("step",)

    def _reads_microbatch(self, index: int) -> bool:
        """Whether something is there for each microbatch only: what was cut for one is there whole, too."""
        return any(
            stage.has(tensor, "microbatch") and not stage.has(tensor, "step")
            for stage in self.stages
            for tensor in self.builder.graph.operators[index].inputs
        )

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
        send, receive = transfer(builder, value, copy, "activation")
        home.forward.append(Entry(-1, [send], sends=(value, copy)))
        stage.forward.append(Entry(-1, [receive], receives=(value, copy)))
        return copy

    # -- backward and update -------------------------------------------------------------------

    def phases(self) -> list[Phases]:
        """Return every stage's steps, with all segments finished."""
        builder, stages = self.builder, range(len(self.stages))
        shared = builder.ground.shared.union(self.late)
        blocks = Blocks(builder, self.blocks, self.stages, self.parameters.pending, shared)
        for stage in reversed(stages):
            blocks.backward(stage)
        more, epilogues = list[Prefetched](), dict[int, Epilogue]()
        is_early = builder.strategy.updates != "step"
        for stage in stages:
            more.append(blocks.forward(stage))
            if not is_early:
                epilogues[stage] = self.epilogue(stage)
        blocks.finish(self.links.finish)
        found = [
            self._phases(stage, blocks.shares(stage), more[stage], epilogues.get(stage))
            for stage in stages
        ]
        return with_pushes(builder, found, self.pushes) if self.pushes else found

    def _phases(
        self, stage: int, own: dict[int, Share], more: Prefetched, epilogue: Epilogue | None
    ) -> Phases:
        """Return a stage's steps: its blocks', ``more`` of none, and the ``epilogue``, which is not made yet
        where parameters are updated early."""
        builder, up = self.builder, list(own)
        down, back = up[::-1], list(own.values())[::-1]
        last = Piece(builder, more.ahead, more.steps)
        prologue = [*[share.prologue for share in own.values()], last]
        backward: list[Rows] = self.linked(down, [share.last for share in back])
        if epilogue is None:
            backward = with_updates(builder, backward, self._updated_early(stage))
            epilogue = self._epilogue(stage)
        updates, homeward = epilogue
        ending = [*map(self.widened, updates), *self.inserted(*homeward)]
        return phases_of(
            builder,
            self.exchange[stage],
            (self.linked([*up, -1], prologue), ending),
            forward=self.linked(up, [share.forward for share in own.values()]),
            inputs=self._inputs(down, back),
            last=backward,
        )

    def _inputs(self, numbers: Sequence[int], shares: Sequence[Share]) -> list[Rows]:
        """Return the first half of backward where it is split, else nothing."""
        splits = self.builder.splits_backward
        return self.linked(numbers, [share.inputs for share in shares]) if splits else []

    def linked(self, numbers: Sequence[int], pieces: Sequence[Piece]) -> list[Rows]:
        """Return pieces of blocks one behind the other, and what comes behind all of them."""
        *woven, carried = joined(pieces)
        late = [(n, piece.late) for n, piece in zip(numbers, pieces, strict=True) if piece.late]
        behind = self.inserted([n for n, _ in late], [[rows] for _, rows in late])
        woven[-1:] = [[*last, *carried] for last in woven[-1:]]
        return [*self.inserted(numbers, woven), *behind]

    def inserted(self, numbers: Sequence[int], parts: Sequence[Sequence[Rows]]) -> list[Rows]:
        """Return what blocks of these ``numbers`` add, with what is to come in between: nothing here."""
        del numbers
        return list(chain.from_iterable(parts))

    def widened(self, rows: Rows) -> Rows:
        """Return a step that touches the parameters of all blocks: these are all, here."""
        return rows

    def epilogue(self, stage: int) -> Epilogue:
        """Return the epilogue of a stage; ``kept`` parameters decide all of it."""
        clips, kept = self.builder.strategy.clips, self.parameters.kept.values()
        key = ("epilogue", stage, clips, *map(id, kept))
        return self.builder.once(key, partial(self._epilogue, stage))

    def _epilogue(self, mesh: int) -> Epilogue:
        """Return the steps that update the parameters of a mesh, each, and by block those that bring
        them back to rest."""
        return [Rows.of(self.builder, [step]) for step in self._updates(mesh)], self._homeward(mesh)

    def _updates(self, mesh: int) -> list[Step]:
        builder = self.builder
        steps: list[Step] = []
        done = {master for masters in builder.updates for master in masters}
        kept, item = [k for k in self._trained(mesh) if k.master not in done], -1
        reduced = tuple([k.reduced for k in kept])
        if builder.strategy.clips or builder.strategy.precision == "float16":
            steps.append(Step(Kind.CLIP, -1, f"compute:{mesh}", reads=reduced))
        masters = tuple([k.master for k in kept])
        if builder.strategy.updates != "step":
            item = len(builder.updates)
            builder.updates.append(masters)
        return [*steps, Step(Kind.UPDATE, item, f"compute:{mesh}", reads=reduced, writes=masters)]

    def _updated_early(self, mesh: int) -> list[Kept]:
        """Return the parameters of a mesh that no other uses: these may be updated within backward."""
        away = {use.tensor for use in self.parameters.uses.values() if use.mesh != mesh}
        return [kept for kept in self._trained(mesh) if kept.tensor not in away]

    def _trained(self, mesh: int) -> list[Kept]:
        return [k for k in self.parameters.kept.values() if k.mesh == mesh and k.reduced >= 0]

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

    def _homeward(self, mesh: int) -> tuple[list[int], list[list[Rows]]]:
        """Return the blocks whose updated parameters messages bring to rest, in the order of forward, and
        these."""
        builder, graph = self.builder, self.builder.graph
        groups: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
        for kept in self.parameters.kept.values():
            if kept.mesh == mesh and kept.master != kept.rest:
                block = graph.block_of[graph.consumers[kept.tensor][0]]
                key = (block, *builder.signature(kept.master, builder.values[kept.rest].layout))
                groups.setdefault(key, []).append((kept.master, kept.rest))
        steps: dict[int, list[Step]] = {}
        for key, pairs in sorted(groups.items(), key=lambda group: group[0][0]):
            chain_of = partial(builder.chain, pairs, "parameter")
            steps.setdefault(key[0], []).extend(builder.once(("back to rest", *pairs), chain_of))
        return list(steps), [[Rows.of(builder, own)] for own in steps.values()]
