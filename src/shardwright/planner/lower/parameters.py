"""Parameters of the Program: at rest, in use, as masters, and where their gradients gather."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import cast

from shardwright.core.layout import PARTIAL, REPLICATE, Layout
from shardwright.core.program import Scope
from shardwright.planner.lower.builder import ProgramBuilder
from shardwright.planner.lower.wire import other_dtype
from shardwright.planner.space.configs import Pair


@dataclass(frozen=True, slots=True)
class Use:
    """One parameter as one mesh uses it. ``source`` is the value it is gathered from, or -1."""

    tensor: int
    mesh: int
    value: int
    source: int


@dataclass(frozen=True, slots=True)
class Kept:
    """One parameter between its uses: its home mesh, values at rest and master, reduced gradient;
    ``resident`` values are there all the time."""

    tensor: int
    mesh: int
    rest: int
    master: int
    reduced: int
    resident: tuple[int, ...]


FirstKey = tuple[int, int, Layout]  # mesh, tensor, layout of value
UseKey = tuple[int, int, Layout, Layout]  # and of gradient


class Parameters:
    """Creates every value which a parameter needs, once."""

    def __init__(self, builder: ProgramBuilder) -> None:
        self.builder = builder
        self.kept: dict[int, Kept] = {}
        self.uses: dict[UseKey, Use] = {}
        self.first_uses: dict[FirstKey, Use] = {}
        self.pending: dict[int, int] = {}  # gradient at use -> reduced gradient
        self.taken: dict[int, None] = {}  # values at rest which are some use's own
        strategy, known = builder.strategy, builder.last_kept
        self.config_of = dict(zip(builder.graph.parameters, strategy.parameters, strict=True))
        self.often = set[int]()  # whose gradients are synchronised with every microbatch
        is_alone = len(strategy.meshes) == 1
        self.served = {
            tensor
            for tensor, config in self.config_of.items()
            if strategy.serves(config, builder.graph.consumers[tensor])
        }
        for tensor, config in zip(builder.graph.parameters, strategy.parameters, strict=True):
            if "microbatch" in (config.sync, strategy.updates):
                self.often.add(tensor)
            readers = builder.graph.consumers[tensor]
            if readers:
                mesh = 0 if is_alone else strategy.home(config, readers)
                like = known.get(tensor)  # configs that stay are mostly the same objects
                if like is None or like[0] is not config or like[1] != mesh:
                    said = (tensor, mesh, config.rest, config.optimizer)
                    kept = builder.once(("keep", *said), partial(self._keep, *said))
                    like = known[tensor] = (config, mesh, kept)
                self.kept[tensor] = kept = cast(Kept, like[2])
                builder.lasting += kept.resident

    def _keep(self, tensor: int, mesh: int, rest_layout: Layout, optimizer: Layout) -> Kept:
        builder, spec = self.builder, self.builder.graph.tensors[tensor]
        if not spec.needs_gradient:
            rest = builder.add_value(tensor, mesh, rest_layout, "step", "parameter", resident=True)
            return Kept(tensor, mesh, rest, rest, -1, (rest,))
        dtype = builder.master_dtype(tensor)
        same = rest_layout == optimizer and dtype == spec.dtype
        scope: Scope = "microbatch" if builder.strategy.updates == "microbatch" else "step"
        reduced = builder.add_value(tensor, mesh, optimizer, scope, "gradient", dtype=dtype)
        builder.reduced.add(reduced)
        rest = master = builder.add_value(
            tensor, mesh, rest_layout, "step", "parameter", resident=True,
            gradient=reduced if same else -1,
        )  # fmt: skip
        if not same:
            master = builder.add_value(
                tensor, mesh, optimizer, "step", "master", dtype=dtype, resident=True,
                gradient=reduced,
            )  # fmt: skip
        return Kept(tensor, mesh, rest, master, reduced, tuple(dict.fromkeys((rest, master))))

    def use(self, mesh: int, tensor: int, pair: Pair) -> Use:
        """Return a parameter at the layouts of a use on a mesh, home or abroad."""
        trained = self.builder.graph.tensors[tensor].needs_gradient
        gradient = pair.gradient if trained else (REPLICATE,) * len(pair.gradient)
        key = (mesh, tensor, pair.value, gradient)
        if key not in self.uses:
            use = self._new_use(mesh, tensor, pair.value, gradient, trained)
            self.uses[key] = use
            self.first_uses.setdefault(key[:3], use)
        return self.uses[key]

    def _at_rest(self, rest: int, gradient: int, is_taken: bool) -> int:
        """Return a parameter as it lies at rest, for a use with a gradient; another value of the same
        storage where it is taken."""
        builder, entry = self.builder, self.builder.values[rest]
        if is_taken:
            return builder.add_value(
                entry.tensor, entry.mesh, entry.layout, "step", "parameter", alias=rest, resident=True,
                gradient=gradient,
            )  # fmt: skip
        self.taken[rest] = None
        if entry.gradient != gradient:
            builder.turn([(rest, gradient)])
        return rest

    def _new_use(
        self, mesh: int, tensor: int, layout: Layout, gradient: Layout, trained: bool
    ) -> Use:
        builder, kept = self.builder, self.kept[tensor]
        is_home = mesh == kept.mesh
        twin = self.first_uses.get((mesh, tensor, layout))
        home = self._gradient(kept, mesh, gradient) if trained else -1
        value, source = kept.rest, -1
        if is_home and builder.values[kept.rest].layout == layout:
            is_own = trained and kept.master == kept.rest and not self._is_reduced(kept, gradient)
            value = self._at_rest(kept.rest, home, is_own or kept.rest in self.taken)
        elif twin is not None:
            value = builder.add_value(
                tensor, mesh, layout, "step", "parameter", alias=twin.value, gradient=home
            )
            source = twin.source
        else:
            value = builder.add_value(tensor, mesh, layout, "step", "parameter", gradient=home)
            source = kept.rest if is_home else -1
        return Use(tensor, mesh, value, source)

    def is_often(self, kept: Kept) -> bool:
        """Whether a parameter's gradient is synchronised with every microbatch."""
        configs, graph = self.builder.strategy.configs, self.builder.graph
        if kept.tensor not in self.often:
            return False
        return {configs[reader].mesh for reader in graph.consumers[kept.tensor]} == {kept.mesh}

    def summed_abroad(self, use: Use) -> int:
        """Return the value that sums up a gradient made away from home, ready to be sent there.

        Without copies and partial sums left, every element of it travels home once. To a server every
        device sends its own term, which is summed up there.
        """
        return self._leaving(
            self.kept[use.tensor], use.mesh, self.builder.values[use.value].gradient
        )

    def _leaving(self, kept: Kept, mesh: int, made: int) -> int:
        """Return the value that a gradient made on a mesh leaves it for home from."""
        builder = self.builder
        lying, reduced = builder.values[made], builder.values[kept.reduced]
        here, home = builder.mesh(mesh), builder.mesh(kept.mesh)
        layout = reduced.layout
        if kept.tensor in self.served:
            layout = lying.layout
        elif here.sizes != home.sizes:
            layout = tuple(REPLICATE if p == PARTIAL else p for p in lying.layout)
        dtype = other_dtype(builder, made) or reduced.dtype
        if (lying.layout, lying.dtype) == (layout, dtype):
            return made
        if made not in self.pending:
            self.pending[made] = builder.add_value(
                kept.tensor, mesh, layout, "step", "gradient", dtype=dtype
            )
        return self.pending[made]

    def _is_reduced(self, kept: Kept, gradient: Layout) -> bool:
        """Whether a gradient made in this layout needs no synchronisation at all."""
        builder = self.builder
        reduced = builder.values[kept.reduced]
        made = (builder.own_dtype(kept.tensor), builder.sum_dtype(kept.tensor))
        return reduced.layout == gradient and reduced.dtype in made

    def _gradient(self, kept: Kept, mesh: int, layout: Layout) -> int:
        if mesh == kept.mesh and self._is_reduced(kept, layout):
            return kept.reduced
        builder = self.builder
        # What other meshes add arrives once, after the last microbatch.
        scope: Scope = "microbatch" if self.is_often(kept) else "step"
        adds = builder.sum_dtype if scope == "step" else builder.own_dtype
        gradient = builder.add_value(
            kept.tensor, mesh, layout, scope, "gradient", dtype=adds(kept.tensor)
        )
        if mesh == kept.mesh:
            self.pending[gradient] = kept.reduced
        elif kept.tensor in self.served:
            self._leaving(kept, mesh, gradient)
        return gradient
