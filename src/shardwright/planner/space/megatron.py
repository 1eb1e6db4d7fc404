"""Tensor parallelism as Megatron-LM does it (arXiv:1909.08053, section 3), in any model.

A linear opens a region in which an activation stays split over its features, until another linear,
or the loss over a vocabulary, closes it with a sum.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from shardwright.core.graph import CASTS, OperatorGraph
from shardwright.core.vocabulary import LOG_SUMS, LOSS
from shardwright.operators.splitting.iteration import PLUS, Iteration
from shardwright.operators.splitting.samples import Samples, State

VIEWS_OF_WEIGHTS = frozenset(
    {"aten.transpose.int", "aten.t.default", "aten.numpy_T.default", "aten.slice.Tensor"}
)
# Besides linears: what takes an activation split over its features and leaves a sum, or little.
CLOSING = frozenset({LOG_SUMS, LOSS})
# Between scores and their loss.
SCORE_CASTS = CASTS | {"aten.type_as.default"}


def megatron_dims(
    graph: OperatorGraph,
    iterations: Sequence[Iteration],
    samples: Samples,
    pieces: int,
    is_sequence: bool,
) -> dict[int, str]:
    """Choose the tensor axis's dims as Megatron does: open at some linears, close at the next."""
    opened = _opening_linears(graph, iterations, samples, pieces)
    opened |= _split_vocabularies(graph, iterations, opened, pieces)
    sharded: dict[int, int] = {}  # activation -> the dim that the axis shards
    tokens: dict[int, int] = {}  # activation between these regions -> where its tokens lie
    dims: dict[int, str] = {}
    for index, operator in enumerate(graph.operators):
        iteration = iterations[index]
        sample = samples.operator_dim[index] if is_sequence else ""
        met = iteration.met(operator.inputs, sharded)
        name = opened.get(index, "") or next(filter(None, met), "")
        if name and (name == PLUS or iteration.dim(name).splits(pieces)):
            dims[index] = name
            sharded |= iteration.handed_on(operator.outputs, name)
            _split_view_of_weight(graph, iterations, dims, index)
        elif not name and sample:
            dims[index] = _sequence_dim(iteration, sample, pieces) or _passing(
                iteration, iteration.met(operator.inputs, tokens), pieces
            )
            tokens |= iteration.handed_on(operator.outputs, dims[index])
    return dims


def _split_view_of_weight(
    graph: OperatorGraph, iterations: Sequence[Iteration], dims: dict[int, str], index: int
) -> None:
    """Let what turns a weight round for a product (``x @ weight.T``) be split as the product is."""
    for tensor, names in zip(graph.operators[index].inputs, iterations[index].inputs, strict=True):
        view = graph.tensors[tensor].producer
        if view not in dims and dims[index] in names and _is_view_of_weight(graph, tensor):
            dims[view] = iterations[view].outputs[0][names.index(dims[index])]


def _is_view_of_weight(graph: OperatorGraph, tensor: int) -> bool:
    view = graph.tensors[tensor].producer
    while view >= 0 and graph.operators[view].kind in VIEWS_OF_WEIGHTS:
        source = graph.tensors[graph.operators[view].inputs[0]]
        if source.role == "parameter":
            return True
        view = source.producer
    return False


def _sequence_dim(iteration: Iteration, sample: str, pieces: int) -> str:
    """Return the dim after the sample dim of a three-dimensional output, if it divides."""
    names = iteration.outputs[0] if iteration.outputs else ()
    if len(names) != 3 or names[0] != sample or names[1] == "":
        return ""
    return names[1] if iteration.dim(names[1]).splits(pieces) else ""


def _passing(iteration: Iteration, met: Sequence[str], pieces: int) -> str:
    """Return the dim along which tokens pass through an operator that sees them in another shape (as routers of
    experts do); "" where they end here or do not divide."""
    for name in filter(None, met):
        if not iteration.is_reduction(name) and iteration.dim(name).splits(pieces):
            return name
    return ""


def _opening_linears(
    graph: OperatorGraph, iterations: Sequence[Iteration], samples: Samples, pieces: int
) -> dict[int, str]:
    """Find linears whose split output can stay split until another linear takes it."""
    found: dict[int, str] = {}
    for index in range(len(graph.operators)):
        if index not in found and _is_split(graph, iterations, index, pieces):
            together = _stays_split(graph, iterations, samples, index, pieces)
            found |= {one: iterations[one].outputs[0][-1] for one in together}
    return found


def _is_split(
    graph: OperatorGraph, iterations: Sequence[Iteration], index: int, pieces: int
) -> bool:
    """Whether an operator is a linear layer whose features divide."""
    if not _is_linear(graph, index):
        return False
    name = iterations[index].outputs[0][-1]
    return bool(name) and iterations[index].dim(name).splits(pieces)


def _is_linear(graph: OperatorGraph, index: int) -> bool:
    """Whether an operator is a linear layer, however it is written: with a weight on its right."""
    operator = graph.operators[index]
    if operator.kind in ("aten.linear.default", "shardwright.linear_blocks"):
        return True
    places = {"aten.addmm.default": 2, "aten.mm.default": 1, "aten.matmul.default": 1}
    if operator.kind not in places:
        return False
    weight = operator.inputs[places[operator.kind]]
    return graph.tensors[weight].role == "parameter" or _is_view_of_weight(graph, weight)


def _split_vocabularies(
    graph: OperatorGraph, iterations: Sequence[Iteration], opened: dict[int, str], pieces: int
) -> dict[int, str]:
    """Split embeddings by rows, and what is linear in a loss's share, where the loss is split."""
    found: dict[int, str] = {}
    shares: set[int] = set()
    for index, operator in enumerate(graph.operators):
        linear = {operator.inputs[position] for position in iterations[index].linear}
        if linear and linear <= shares:
            found[index] = PLUS
            shares.update(operator.outputs)
        if operator.kind == LOSS:
            scores = _maker(graph, operator.inputs[0])
            shares.update(operator.outputs if scores in opened else ())
    return found | _split_rows(graph, iterations, pieces) if shares else {}


def _split_rows(
    graph: OperatorGraph, iterations: Sequence[Iteration], pieces: int
) -> dict[int, str]:
    """Split embeddings by rows."""
    return {
        index: iteration.offset
        for index, iteration in enumerate(iterations)
        if graph.operators[index].kind == "aten.embedding.default" and iteration.offset
        if iteration.dim(iteration.offset).splits(pieces)
    }


def _maker(graph: OperatorGraph, tensor: int) -> int:
    """Return the operator that made scores, before they were cast for the loss; -1 for none."""
    maker = graph.tensors[tensor].producer
    while maker >= 0 and graph.operators[maker].kind in SCORE_CASTS:
        maker = graph.tensors[graph.operators[maker].inputs[0]].producer
    return maker


def _stays_split(
    graph: OperatorGraph,
    iterations: Sequence[Iteration],
    samples: Samples,
    index: int,
    pieces: int,
) -> list[int]:
    """Follow what a linear makes, split over its features; return it with the linears whose results are
    added to that, none where some path does not end at a reduction of the split dim.

    Readers are visited in the order of the graph, so that all split inputs of one are known.
    """
    opened, closed = [index], False
    sharded = _features(graph, index)
    pending = sorted({reader for tensor in sharded for reader in graph.consumers[tensor]})
    while pending:
        reader = heapq.heappop(pending)
        if pending and pending[0] == reader:
            continue
        operator, iteration = graph.operators[reader], iterations[reader]
        name, *others = set(iteration.met(operator.inputs, sharded))
        if others or not name or not iteration.dim(name).splits(pieces):
            return []
        if _is_linear(graph, reader) or operator.kind in CLOSING:
            closed = True
            continue
        makers = [graph.tensors[one].producer for one in _unsplit(graph, samples, reader, sharded)]
        if iteration.is_reduction(name) or not all(
            _is_split(graph, iterations, maker, pieces) for maker in makers
        ):
            return []
        opened += makers
        for maker in (reader, *makers):
            for other in graph.readers(maker):
                if other != reader:
                    heapq.heappush(pending, other)
        for maker in makers:
            sharded |= _features(graph, maker)
        sharded |= iteration.handed_on(operator.outputs, name)
    return opened if closed else []


def _features(graph: OperatorGraph, index: int) -> dict[int, int]:
    """Return the results of a linear with the place of their features."""
    outputs = graph.operators[index].outputs
    return {tensor: len(graph.tensors[tensor].shape) - 1 for tensor in outputs}


def _unsplit(
    graph: OperatorGraph, samples: Samples, index: int, sharded: dict[int, int]
) -> list[int]:
    """Return the trained activations that are added to a split one from outside its region: the residual
    stream, unless a linear makes them, which may be split likewise.

    Masks are not trained, and biases by position (of T5, of ALiBi) know no samples: where scores
    are split by heads they are read in pieces.
    """
    operator = graph.operators[index]
    if not operator.kind.startswith("aten.add."):
        return []
    return [
        tensor
        for tensor in operator.inputs
        if tensor not in sharded
        and graph.tensors[tensor].producer >= 0
        and graph.tensors[tensor].needs_gradient
        and samples.state[tensor] is not State.FREE
    ]
