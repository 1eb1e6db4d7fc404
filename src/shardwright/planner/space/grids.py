"""Tensor parallelism in two and three dimensions, as points of the space.

A *grid* arranges all devices by axes of two sorts. *Row* axes only cut the batch. *Column* axes also
cut the features: activations lie with their last dim split, so that no device holds a whole one.
A linear layer is then (papers: SUMMA and Optimus, arXiv 2104.05343; Tesseract, 2105.14500; 3-D,
2105.14450)

* on a plane, with one column axis c: input features split by c are gathered over c, output features
  are split by c again (2-D; with a further row axis, the depth, 2.5-D);
* in a cube, with two column axes of which c splits the features and r the rows: the input is
  gathered over r, output features are split by r, and partial sums over c are scattered to rows.
  The axes swap roles at every linear layer.

Weights are sharded at rest over the row axes as well. What no column axis can follow (a
normalisation needs all features) is split along the sequence instead, for that operator only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from shardwright.core.graph import OperatorGraph
from shardwright.core.layout import PARTIAL, REPLICATE, Layout
from shardwright.core.strategy import (
    GradientSync,
    Mesh,
    OperatorConfig,
    ParameterConfig,
    Pipeline,
    Precision,
    Strategy,
)
from shardwright.operators.splitting.iteration import PLUS, Dim, Iteration, pieces_by_dim
from shardwright.operators.splitting.samples import Samples, State, find_samples
from shardwright.planner.space.configs import is_choice, wanted_as
from shardwright.planner.space.legal import depend_on_parameters
from shardwright.planner.space.rest import shard_further
from shardwright.planner.space.seeds import block_buckets, data_dim, repeated_blocks

AXES = {
    "summa": ("row", "column"),
    "tesseract": ("depth", "row", "column"),
    "cube": ("weight", "input", "output"),
}
TITLES = {"summa": "2-D", "tesseract": "2.5-D", "cube": "3-D"}
EMBEDDING = "aten.embedding.default"
Form = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A named arrangement and its sizes, one per axis of ``AXES[name]``.

    ``keeps``: gathered weights stay from forward to backward (the papers' cube) instead of being
    gathered again.
    """

    name: str
    sizes: tuple[int, ...]
    num_microbatches: int = 1
    keeps: bool = False
    recompute: bool = False
    precision: Precision = "float32"

    def __post_init__(self) -> None:
        axes = AXES.get(self.name)
        if axes is None or len(self.sizes) != len(axes) or min(self.sizes, default=0) < 1:
            raise ValueError(f"there is no grid {self.name!r} of sizes {self.sizes}")

    @property
    def num_columns(self) -> int:
        """How many of the last axes split features."""
        return 2 if self.name == "cube" else 1

    @property
    def row_pieces(self) -> int:
        """Into how many pieces rows are cut at most, where columns change places."""
        rows = math.prod(self.sizes[: -self.num_columns])
        return rows * (max(self.sizes[1:]) if self.name == "cube" else 1)

    @property
    def label(self) -> str:
        """The name people know it by."""
        parts = [
            f"{self.name} {'x'.join(map(str, self.sizes))} ({TITLES[self.name]} tensor parallel)"
        ]
        parts += ["no reshard after forward"] if self.keeps else []
        parts += [f"{self.num_microbatches} microbatches"] if self.num_microbatches > 1 else []
        parts += ["recomputation"] if self.recompute else []
        return ", ".join(parts)


def grid_strategy(graph: OperatorGraph, grid: Grid, samples: Samples | None = None) -> Strategy:
    """Return the strategy of a grid on devices 0, 1, 2, ..., the last axis varying fastest.

    Raises ValueError where the batch or a layer of a repeated block does not divide. Elsewhere (the
    output head) an operator that does not divide is split by rows instead.
    """
    samples = samples or find_samples(graph)
    mesh = Mesh(axes=AXES[grid.name], sizes=grid.sizes, devices=tuple(range(math.prod(grid.sizes))))
    walk = _Walk(graph, grid, samples)
    configs = [OperatorConfig(mesh=0, dims=dims) for dims in walk.run()]
    return Strategy(
        meshes=(mesh,),
        configs=tuple(configs),
        parameters=tuple(
            _parameter(graph, tensor, wanted_as(graph, samples, tensor, configs), grid)
            for tensor in graph.parameters
        ),
        pipeline=Pipeline(num_microbatches=grid.num_microbatches),
        gradient_sync=GradientSync(method="block", buckets=block_buckets(graph)),
        recompute=repeated_blocks(graph) if grid.recompute else (),
        precision=grid.precision,
        label=grid.label,
    )


def _parameter(graph: OperatorGraph, tensor: int, use: Layout, grid: Grid) -> ParameterConfig:
    """Shard matrices further over every axis but the depth; vectors stay as they are used."""
    shape = graph.tensors[tensor].shape
    first = 1 if grid.name == "tesseract" else 0
    axes = tuple(range(first, len(grid.sizes)))
    rest = shard_further(shape, use, grid.sizes, axes) if len(shape) > 1 else use
    return ParameterConfig(rest=rest, optimizer=rest, keeps=grid.keeps and rest != use)


class _Walk:
    """One pass through the graph in order: a config per operator, a *form* per activation.

    A form says, per axis, which dim of the activation the axis splits in the stream, REPLICATE for
    none, PARTIAL where a sum over the axis is under way. It is what the next operators follow,
    while an operator that cannot keep it may lie differently for itself.
    """

    def __init__(self, graph: OperatorGraph, grid: Grid, samples: Samples) -> None:
        self.graph, self.grid, self.samples = graph, grid, samples
        self.iterations = samples.iterations
        self.form: dict[int, Form] = {}
        self.columns = range(len(grid.sizes) - grid.num_columns, len(grid.sizes))
        self.strict = set(graph.operators_of(repeated_blocks(graph)))
        self.trained = depend_on_parameters(graph)

    def run(self) -> list[tuple[str, ...]]:
        """Return the dims of every operator's config."""
        return [self._visit(index) for index in range(len(self.graph.operators))]

    def _visit(self, index: int) -> tuple[str, ...]:
        trained = self.trained[index]
        wanted = [data_dim(self.graph, self.samples, self.iterations[index], index)]
        wanted *= len(self.grid.sizes)
        for axis in self.columns:
            wanted[axis] = self._followed(index, axis) if trained else ""
        form = self._turn(index, wanted) if trained else {}
        alone = [size == 1 for size in self.grid.sizes]
        dims = tuple("" if one else name for one, name in zip(alone, wanted, strict=True))
        if not self._is_choice(index, dims) and index not in self.strict:
            form = {}
            dims = self._with(dims, self.columns, "")
        if not self._is_choice(index, dims):
            raise ValueError(self._complaint(index, dims))
        lost = [axis for axis in self.columns if dims[axis] == "" and self._is_lost(index, axis)]
        for axis in lost:
            options = [self._with(dims, (axis,), name) for name in self._elsewhere(index)]
            dims = next((other for other in options if self._is_choice(index, other)), dims)
        self._set_forms(index, dims, form, lost)
        return dims

    @staticmethod
    def _with(dims: tuple[str, ...], axes: Iterable[int], name: str) -> tuple[str, ...]:
        return tuple(name if axis in axes else old for axis, old in enumerate(dims))

    # -- what an operator would like ---------------------------------------------------------------

    def _followed(self, index: int, axis: int) -> str:
        """Return the dim by which an operator keeps the form of its inputs along an axis."""
        operator, iteration = self.graph.operators[index], self.iterations[index]
        data = data_dim(self.graph, self.samples, iteration, index)
        forms = [(at, self.form[t][axis]) for at, t in enumerate(operator.inputs) if t in self.form]
        for position, dim in forms:
            if dim >= 0 and iteration.inputs[position][dim]:
                return iteration.inputs[position][dim]
            if dim == PARTIAL:
                return PLUS if data == PLUS else ""
        begins = self.samples.operator_dim[index] != "" or operator.kind == EMBEDDING
        names = _result_dims(iteration)
        if forms or not begins or not names:
            return ""
        is_last = axis == self.columns[-1]
        return names[-1] if is_last else self.samples.operator_dim[index]

    def _turn(self, index: int, wanted: list[str]) -> dict[int, int]:
        """Write a linear layer's column axes into ``wanted``; return its output's form on them."""
        found = _linear(self.graph, self.samples, self.iterations[index], index)
        if found is None:
            return {}
        iteration = self.iterations[index]
        position, summed = found
        names, last = iteration.inputs[position], len(iteration.outputs[0]) - 1
        features, sample = iteration.outputs[0][last], self.samples.operator_dim[index]
        if len(self.columns) == 1:
            wanted[self.columns[0]] = features
            return {self.columns[0]: last}
        rows, column = self.columns
        form = self.form.get(self.graph.operators[index].inputs[position])
        if form and (form[rows] == names.index(summed) or form[column] == names.index(sample)):
            rows, column = column, rows
        wanted[rows], wanted[column] = features, summed
        return {rows: last, column: iteration.outputs[0].index(sample)}

    # -- what it may have --------------------------------------------------------------------------

    def _is_choice(self, index: int, dims: tuple[str, ...]) -> bool:
        sample, count = self.samples.operator_dim[index], self.grid.num_microbatches
        return is_choice(self.iterations[index], dims, self.grid.sizes, sample, count)

    def _is_lost(self, index: int, axis: int) -> bool:
        """Whether an operator cannot keep the form that an input has along an axis."""
        inputs = self.graph.operators[index].inputs
        return any(tensor in self.form and self.form[tensor][axis] >= 0 for tensor in inputs)

    def _elsewhere(self, index: int) -> list[str]:
        """Return where else an axis may go: the sequence, or the samples."""
        names = _result_dims(self.iterations[index])
        sample = self.samples.operator_dim[index]
        sequence = names[1] if len(names) > 2 and names[0] == sample else ""
        return [name for name in (sequence, sample) if name]

    def _set_forms(
        self, index: int, dims: tuple[str, ...], form: dict[int, int], lost: list[int]
    ) -> None:
        operator, iteration = self.graph.operators[index], self.iterations[index]
        for tensor, names in zip(operator.outputs, iteration.outputs, strict=True):
            like = self._forms_like(tensor, operator.inputs)
            lies = {"": REPLICATE, **{name: at for at, name in enumerate(names) if name}}
            found = dict(enumerate([lies.get(name, PARTIAL) for name in dims]))
            found |= {axis: like[0][axis] for axis in lost if like}
            found |= form
            found |= {axis: REPLICATE for axis, size in enumerate(self.grid.sizes) if size == 1}
            if self.trained[index]:
                self.form[tensor] = tuple(found.values())

    def _forms_like(self, tensor: int, inputs: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return the forms of inputs that have a tensor's shape."""
        tensors = self.graph.tensors
        alike = [t for t in inputs if tensors[t].shape == tensors[tensor].shape]
        return [self.form[t] for t in alike if t in self.form]

    def _complaint(self, index: int, dims: tuple[str, ...]) -> str:
        """Say which dim of an operator does not divide."""
        iteration, sample = self.iterations[index], self.samples.operator_dim[index]
        known = {dim.name: dim for dim in iteration.dims}
        pieces = pieces_by_dim(dims, self.grid.sizes)
        if sample in pieces:
            pieces[sample] *= self.grid.num_microbatches
        operator = self.graph.operators[index]
        shape = self.graph.tensors[(operator.outputs or operator.inputs)[0]].shape
        fault = (name for name, count in pieces.items() if not known[name].splits(count))
        name = next(fault, "")
        if not name:
            return (
                f"{self.grid.label} must split {operator.name} (shape {shape}) by {dims}, which "
                "its rule does not allow; choose another grid"
            )
        what, remedy = f"dim {name!r} of {operator.name} (shape {shape})", "a smaller grid"
        if name == sample:
            what, remedy = "the global batch", f"a multiple of {pieces[name]}, or a smaller grid"
        return f"{self.grid.label} must divide {what} into {_limit(known[name], pieces[name])}; choose {remedy}"


def _linear(
    graph: OperatorGraph, samples: Samples, iteration: Iteration, index: int
) -> tuple[int, str] | None:
    """Return (input position, summed dim) of a product of samples with weights, else None.

    Its input lacks the output's last dim, its weights have no samples, and both have the dim that
    the output lacks.
    """
    operator = graph.operators[index]
    names = _result_dims(iteration)
    sample = samples.operator_dim[index]
    if not names or not names[-1] or sample not in names[:-1] or not sample:
        return None
    weights = [
        names
        for tensor, names in zip(operator.inputs, iteration.inputs, strict=True)
        if samples.state[tensor] is State.FREE and len(graph.tensors[tensor].shape) > 1
    ]
    found = (
        (position, summed)
        for position, own in enumerate(iteration.inputs)
        if sample in own and names[-1] not in own
        for summed in own
        if summed and summed not in names and any(summed in w for w in weights)
    )
    return next(found, None)


def _result_dims(iteration: Iteration) -> tuple[str, ...]:
    """Return the dims of an operator's first result; what writes a buffer has none."""
    return iteration.outputs[0] if iteration.outputs else ()


def _limit(dim: Dim, count: int) -> str:
    """Say into how many pieces a dim is to be divided, and why it cannot be."""
    limit = f"its size is {dim.size}"
    if dim.size % count == 0:  # pieces of an image must not be smaller than their halos
        limit = f"its windows allow {dim.most} pieces at most"
    return f"{count} equal pieces, but {limit}"
