"""One change of a strategy at a time, with all that follows from it.

Changing how an operator is split changes where its parameters lie. The functions here see to that, so
that whoever searches by moves says only what is to change. Whether the result is legal, lowering decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from shardwright.core.layout import PARTIAL, Layout
from shardwright.core.strategy import OperatorConfig, ParameterConfig, Strategy
from shardwright.operators.splitting.iteration import PLUS
from shardwright.planner.model.context import Context
from shardwright.planner.space.configs import choices
from shardwright.planner.space.rest import shard_further

Dims = tuple[str, ...]


class Space:
    """The configs that the operators of one context may have, remembered."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.number = {tensor: n for n, tensor in enumerate(context.graph.parameters)}
        self._choices: dict[tuple[int, tuple[int, ...], int], tuple[Dims, ...]] = {}
        self._equals: dict[int, list[int]] = {}
        for index, root in enumerate(context.facts.ties.root):
            self._equals.setdefault(root, []).append(index)

    def equals(self, index: int) -> list[int]:
        """Return the operators at the same place of equal blocks, this one among them."""
        return self._equals[self.context.facts.ties.root[index]]

    def alike(self, strategy: Strategy, index: int, sizes: tuple[int, ...]) -> list[int]:
        """Return which of an operator's equals run on meshes of these sizes."""
        configs, meshes = strategy.configs, strategy.meshes
        return [one for one in self.equals(index) if meshes[configs[one].mesh].sizes == sizes]

    def edges(self, index: int) -> list[tuple[int, int]]:
        """Return (tensor, operator) for every neighbour of an operator, makers first."""
        graph = self.context.graph
        operator = graph.operators[index]
        makers = [(tensor, graph.tensors[tensor].producer) for tensor in operator.inputs]
        readers = [(t, reader) for t in operator.outputs for reader in graph.consumers[t]]
        return list(dict.fromkeys(edge for edge in (*makers, *readers) if edge[1] >= 0))

    def fitting(
        self, index: int, sizes: tuple[int, ...], pieces: int, tensor: int, wanted: Layout
    ) -> list[Dims]:
        """Return the splits over axes of these sizes in which a tensor of an operator lies as wanted."""
        options = self.splits(index, sizes, pieces)
        return [dims for dims in options if self.layout(index, dims, tensor) == wanted]

    def parameters_of(self, index: int) -> list[int]:
        """Return the parameters that an operator reads, as tensors."""
        return [t for t in self.context.graph.operators[index].inputs if t in self.number]

    def readers(self, indices: Iterable[int]) -> set[int]:
        """Return the operators that read what these make."""
        return set[int]().union(*map(self.context.graph.readers, indices))

    def splits(self, index: int, sizes: tuple[int, ...], num_microbatches: int) -> tuple[Dims, ...]:
        """Return every split of an operator over axes of these sizes."""
        context, root = self.context, self.context.facts.ties.root[index]
        key = (root, sizes, num_microbatches)
        if key not in self._choices:
            sample = context.facts.samples.operator_dim[root]
            self._choices[key] = choices(
                context.facts.iteration(root), sizes, sample, num_microbatches
            )
        return self._choices[key]

    def legal(self, strategy: Strategy, index: int, mesh: int) -> list[Dims]:
        """Return the splits of an operator on a mesh that pass on no sums which nobody makes."""
        sizes, pieces = strategy.meshes[mesh].sizes, strategy.pipeline.num_microbatches
        arriving = self._arriving(strategy, index, mesh)
        return [dims for dims in self.splits(index, sizes, pieces) if _has_sums(dims, arriving)]

    def layout(self, index: int, dims: Dims, tensor: int) -> Layout:
        """Return how a tensor lies as one of its makers or readers makes or wants it."""
        operator, placed = (
            self.context.graph.operators[index],
            self.context.facts.placements(index, dims),
        )
        if tensor in operator.outputs:
            return placed.outputs[operator.outputs.index(tensor)].value
        return placed.inputs[operator.inputs.index(tensor)].value

    def seconds(self, strategy: Strategy, index: int, dims: Dims) -> float:
        """Return the seconds of an operator's work in one microbatch, split so."""
        sizes = strategy.meshes[strategy.configs[index].mesh].sizes
        return self.context.work_seconds(index, dims, sizes, strategy.pipeline.num_microbatches)

    def dangling(self, strategy: Strategy, indices: Iterable[int]) -> list[int]:
        """Return those of the operators that pass on partial sums which they do not get."""
        configs = strategy.configs
        passing = (index for index in sorted(set(indices)) if PLUS in configs[index].dims)
        return [one for one in passing if self.without_sums(strategy, one) != configs[one].dims]

    def without_sums(self, strategy: Strategy, index: int) -> Dims:
        """Return an operator's split with the partial sums left out that it does not get."""
        config = strategy.configs[index]
        arriving = self._arriving(strategy, index, config.mesh)
        return tuple(
            "" if name == PLUS and not _is_partial(arriving, axis) else name
            for axis, name in enumerate(config.dims)
        )

    def _arriving(self, strategy: Strategy, index: int, mesh: int) -> list[Layout]:
        """Return how that is made in which an operator is linear, () where on another mesh."""
        context, found = self.context, list[Layout]()
        operator = context.graph.operators[index]
        for position in context.facts.iteration(index).linear:
            tensor = operator.inputs[position]
            producer = context.graph.tensors[tensor].producer
            layout: Layout = ()
            if producer >= 0 and strategy.configs[producer].mesh == mesh:
                place = context.graph.operators[producer].outputs.index(tensor)
                dims = strategy.configs[producer].dims
                layout = context.facts.placements(producer, dims).outputs[place].value
            found.append(layout)
        return found


def _has_sums(dims: Dims, arriving: list[Layout]) -> bool:
    return all(_is_partial(arriving, axis) for axis, name in enumerate(dims) if name == PLUS)


def _is_partial(arriving: list[Layout], axis: int) -> bool:
    return all(bool(layout) and layout[axis] == PARTIAL for layout in arriving)


def resplit(space: Space, strategy: Strategy, changes: Mapping[int, Dims]) -> Strategy:
    """Split operators differently where they are; their parameters follow."""
    configs = list(strategy.configs)
    for index, dims in changes.items():
        configs[index] = OperatorConfig(mesh=configs[index].mesh, dims=dims)
    return follow(space, strategy, replace(strategy, configs=tuple(configs)), changes)


def mend(space: Space, strategy: Strategy, changed: Iterable[int]) -> Strategy:
    """Let operators behind changed ones stop to pass on partial sums that they no longer get."""
    left = {*changed, *space.readers(changed)}
    while left:
        wrong = space.dangling(strategy, left)[:1]
        if not wrong:
            return strategy
        strategy = resplit(space, strategy, {wrong[0]: space.without_sums(strategy, wrong[0])})
        left = {one for one in left if one > wrong[0]} | space.readers(wrong)
    return strategy


def follow(space: Space, before: Strategy, after: Strategy, changed: Iterable[int]) -> Strategy:
    """Let the parameters of the changed operators lie as these use them, sharded further or not as
    before."""
    parameters = list(after.parameters)
    touched = {tensor for index in changed for tensor in space.parameters_of(index)}
    for tensor in sorted(touched):
        use, _ = _home(space, before, tensor)
        config = before.parameters[space.number[tensor]]
        parameters[space.number[tensor]] = lay(
            space, after, tensor, config, (config.rest != use, config.optimizer != use)
        )
    return replace(after, parameters=tuple(parameters))


def lay(
    space: Space, strategy: Strategy, tensor: int, how: ParameterConfig, finer: tuple[bool, bool]
) -> ParameterConfig:
    """Lay a parameter, and its optimizer's share, as used or finer; the rest of ``how`` stays.

    Only what is finer at rest can be kept gathered.
    """
    use, sizes = _home(space, strategy, tensor)
    fine = shard_further(space.context.graph.tensors[tensor].shape, use, sizes)
    rest, optimizer = (fine if is_finer else use for is_finer in finer)
    return replace(how, rest=rest, optimizer=optimizer, keeps=how.keeps and rest != use)


def _home(space: Space, strategy: Strategy, tensor: int) -> tuple[Layout, tuple[int, ...]]:
    """Return a parameter's layout in use on its home, the first mesh that reads it, and its sizes."""
    graph = space.context.graph
    readers = graph.consumers[tensor]
    first = min(readers, key=lambda reader: strategy.configs[reader].mesh)
    config = strategy.configs[first]
    position = graph.operators[first].inputs.index(tensor)
    placed = space.context.facts.placements(first, config.dims)
    return placed.inputs[position].value, strategy.meshes[config.mesh].sizes
