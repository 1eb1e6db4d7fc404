"""Random changes of a strategy: the proposals of a Markov chain over SOAP and what SOAP lacks.

FlexFlow (MLSys 2019) picks an operator and gives it any config. So do these, over every dim an
operator has, reductions too; besides they place operators on other devices, shard parameters and
optimizer states further, have results made again in backward, and begin segments. FlexFlow's
program also carries a new config on to neighbours; ``Walk`` does, since an operator that changes
alone mostly pays for messages on both sides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from shardwright.chains.places import Place, fine_mesh, move, smallest_prime
from shardwright.core.strategy import Mesh, Strategy
from shardwright.planner.search.local.moves import Space, lay, mend, resplit

# How often each sort is drawn: where operators are split decides most.
SHARES = (("split", 6), ("carry", 6), ("keep", 3), ("recompute", 1), ("place", 2), ("start", 1))
# FlexFlow's program goes on to another neighbour so often (``rewrite``).
GOES_ON = 0.75


class Drawing:
    """Draws changes. Those of one operator are symmetric: as likely as the way back."""

    def __init__(self, space: Space, random: Random) -> None:
        self.space, self.random = space, random
        context = space.context
        self._operators = range(len(context.graph.operators))
        self._ranges = _ranges(context.num_devices)
        self._meshes: dict[tuple[int, ...], Mesh] = {}
        shares = dict(SHARES)
        if context.training.recompute != "auto":
            del shares["recompute"]
        if context.num_devices == 1:
            shares = {"recompute": 1} if "recompute" in shares else {"split": 1}
        self._names, self._weights = list(shares), list(shares.values())
        self._draws: dict[str, Callable[[Strategy, int], Strategy]] = {
            "split": self._split,
            "carry": self._carry,
            "keep": self._keep,
            "recompute": self._recompute,
            "place": self._place,
            "start": self._start,
        }

    def draw(self, strategy: Strategy) -> Strategy:
        """Return a changed strategy, or the same one where the draw changes nothing.

        Raises ValueError where it is illegal; lowering may find it illegal too.
        """
        name = self.random.choices(self._names, self._weights)[0]
        return self._draws[name](strategy, self.random.choice(self._operators))

    def anything(self, strategy: Strategy) -> Strategy:
        """Return a strategy on the same meshes in which every operator is split at random."""
        space, configs = self.space, strategy
        for index in self._operators:
            legal = space.legal(configs, index, configs.configs[index].mesh)
            listed = list(configs.configs)
            listed[index] = replace(listed[index], dims=self.random.choice(legal))
            configs = replace(configs, configs=tuple(listed))
        changes = {index: configs.configs[index].dims for index in self._operators}
        made = resplit(space, strategy, changes)
        sync = replace(strategy.gradient_sync, method="wfbp", buckets=())
        return replace(made, gradient_sync=sync, label="random splits")

    def _is_heads(self) -> bool:
        """Throw a coin: all equal blocks or one, all of a mesh or one operator."""
        return self.random.random() < 0.5

    def _members(self, strategy: Strategy, index: int) -> list[int]:
        """Return an operator alone, or with those at its place in equal blocks."""
        if not self._is_heads():
            return [index]
        sizes = strategy.meshes[strategy.configs[index].mesh].sizes
        return self.space.alike(strategy, index, sizes)

    def _split(self, strategy: Strategy, index: int) -> Strategy:
        space = self.space
        dims = self.random.choice(space.legal(strategy, index, strategy.configs[index].mesh))
        changes = {
            member: dims
            for member in self._members(strategy, index)
            if strategy.configs[member].dims != dims
        }
        if not changes:
            return strategy
        changed = resplit(space, strategy, changes)
        wrong = space.dangling(changed, {*changes, *space.readers(changes)})
        if wrong:
            name = space.context.graph.operators[wrong[0]].name
            raise ValueError(f"operator {name} would pass on partial sums that nobody makes")
        return changed

    def _carry(self, strategy: Strategy, index: int) -> Strategy:
        """Split an operator anew and neighbours so that nothing moves between them."""
        mesh = strategy.configs[index].mesh
        dims = self.random.choice(self.space.legal(strategy, index, mesh))
        tied = self._is_heads()
        return self._walk(strategy, index, Place(strategy.meshes[mesh], dims), tied)

    def _place(self, strategy: Strategy, index: int) -> Strategy:
        """Run an operator, and some around it, on other devices."""
        # What is not trained is made wherever it is read; stages of a pipeline stay as they are.
        if strategy.pipeline.num_microbatches > 1 or not self._is_trained(index):
            return strategy
        if len(strategy.meshes) > 1 and self._is_heads():
            return self._join(strategy, strategy.configs[index].mesh)
        count = self.random.choice(list(self._ranges))
        start = self.random.choice(self._ranges[count])
        devices = tuple(range(start, start + count))
        if devices not in self._meshes:
            self._meshes[devices] = fine_mesh(devices, self.space.context.cluster)
        mesh = self._meshes[devices]
        # On its new mesh no partial sums arrive, unless the walk brings their maker along.
        options = self.space.splits(index, mesh.sizes, 1)
        dims = self.random.choice([dims for dims in options if "+" not in dims])
        return self._walk(strategy, index, Place(mesh, dims), False)

    def _join(self, strategy: Strategy, leaves: int) -> Strategy:
        """Run all that runs on one mesh where another mesh is."""
        here, there = strategy.meshes[leaves], self.random.choice(strategy.meshes)
        fits = here.sizes == there.sizes
        new: dict[int, Place] = {}
        for index, config in enumerate(strategy.configs):
            if config.mesh == leaves:
                new[index] = Place(there, config.dims if fits else ("",) * len(there.sizes))
        return self._applied(strategy, new)

    def _walk(self, strategy: Strategy, index: int, place: Place, tied: bool) -> Strategy:
        """Change an operator and, from neighbour to neighbour, others to fit it."""
        space, random = self.space, self.random
        tensors = space.context.graph.tensors
        new: dict[int, Place] = {index: place}
        at = index
        while random.random() < GOES_ON:
            edges = [e for e in space.edges(at) if e[1] not in new and self._is_trained(e[1])]
            if not edges:
                break
            weights = [max(1, tensors[tensor].bytes) for tensor, _ in edges]
            tensor, other = random.choices(edges, weights)[0]
            wanted = space.layout(at, new[at].dims, tensor)
            pieces = strategy.pipeline.num_microbatches
            fitting = space.fitting(other, place.mesh.sizes, pieces, tensor, wanted)
            if not fitting:
                break
            new[other] = Place(place.mesh, random.choice(fitting))
            at = other
        if tied:
            new = self._on_equals(strategy, new)
        return self._applied(strategy, new)

    def _is_trained(self, index: int) -> bool:
        graph = self.space.context.graph
        return any(
            graph.tensors[tensor].needs_gradient for tensor in graph.operators[index].outputs
        )

    def _on_equals(self, strategy: Strategy, new: dict[int, Place]) -> dict[int, Place]:
        found: dict[int, Place] = {}
        for index, place in new.items():
            for other in self.space.alike(strategy, index, place.mesh.sizes):
                found[other] = Place(strategy.meshes[strategy.configs[other].mesh], place.dims)
        return found

    def _applied(self, strategy: Strategy, new: dict[int, Place]) -> Strategy:
        """Apply changes; operators behind them stop to pass on sums which they no longer get."""
        space = self.space
        stays = all(
            strategy.meshes[strategy.configs[index].mesh] == place.mesh
            for index, place in new.items()
        )
        if stays:
            dims = {
                index: place.dims
                for index, place in new.items()
                if strategy.configs[index].dims != place.dims
            }
            changed = resplit(space, strategy, dims)
        else:
            changed = move(space, strategy, new)
        return mend(space, changed, new if stays else self._operators)

    def _keep(self, strategy: Strategy, index: int) -> Strategy:
        """Shard an operator's parameters further, or not; reduce their gradients more often, or
        not."""
        finer = self.random.choice(((False, False), (False, True), (True, True)))
        sync = self.random.choice(("step", "microbatch"))
        parameters = list(strategy.parameters)
        for member in self._members(strategy, index):
            for tensor in self.space.parameters_of(member):
                number = self.space.number[tensor]
                if self.space.context.graph.tensors[tensor].needs_gradient:
                    how = replace(strategy.parameters[number], sync=sync)
                    parameters[number] = lay(self.space, strategy, tensor, how, finer)
        if tuple(parameters) == strategy.parameters:
            return strategy
        return replace(strategy, parameters=tuple(parameters))

    def _recompute(self, strategy: Strategy, index: int) -> Strategy:
        """Make an operator's results, or its whole block's, again in backward, or not."""
        members = self._members(strategy, index)
        if self._is_heads():
            again = set(strategy.recompute_operators) ^ set(members)
            return replace(strategy, recompute_operators=tuple(sorted(again)))
        ties = self.space.context.facts.ties
        blocks = {ties.number[ties.block[member]] for member in members}
        return replace(strategy, recompute=tuple(sorted(set(strategy.recompute) ^ blocks)))

    def _start(self, strategy: Strategy, index: int) -> Strategy:
        """Begin a segment at an operator, or not."""
        starts = set(strategy.segment_starts) ^ set(self._members(strategy, index))
        return replace(strategy, segment_starts=tuple(sorted(starts)))


def _ranges(count: int) -> dict[int, list[int]]:
    """Return the first devices of every aligned range, by its length: all, halves, quarters ..."""
    found: dict[int, list[int]] = {}
    length = count
    while True:
        found[length] = list(range(0, count, length))
        if length == 1:
            return found
        length //= smallest_prime(length)
