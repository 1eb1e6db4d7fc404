"""Which operators are worth running again, by the names people know.

``blocks`` runs every operator of the repeated blocks again. ``selective``, besides sending copies in
other layouts again as Megatron's sequence parallelism does, all but the products:
results that cost little to make but much to keep (norms, activation functions, dropout; Chen et al.,
"Training Deep Nets with Sublinear Memory Cost", section 3, drops the same). ``attention`` what grows
with the square of the sequence (Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models", section 4.2.2); fused attention keeps nothing of that size without dropout.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Sequence
from dataclasses import replace

from shardwright.core.graph import OperatorGraph
from shardwright.core.strategy import Recomputation, Strategy
from shardwright.operators.derivatives import (
    base_kind,
    is_view,
    shares_storage,
    storages,
)
from shardwright.operators.keeping.kept import KEEPS_INPUT, KEEPS_OUTPUT, saved_tensors
from shardwright.planner.space.seeds import repeated_blocks

# Besides functions of single elements: what takes one or two passes over its operands.
CHEAP = (
    frozenset({
        "add", "sub", "rsub", "mul", "div", "neg", "mean", "to", "_to_copy", "type_as", "where",
        "masked_fill", "maximum", "minimum", "layer_norm", "native_layer_norm", "rms_norm",
        "_fused_rms_norm", "group_norm", "dropout", "native_dropout", "max_pool2d", "clone", "cat",
        "pow", "clamp", "clamp_min", "clamp_max",
    })
    | KEEPS_INPUT
    | KEEPS_OUTPUT
)  # fmt: skip
SOFTMAX = frozenset({"softmax", "_softmax"})
SCORES = frozenset({"matmul", "bmm", "einsum", "baddbmm"})


def with_recomputation(graph: OperatorGraph, strategy: Strategy, name: Recomputation) -> Strategy:
    """Return the strategy recomputing in every repeated block what ``name`` says, and nothing else."""
    blocks = repeated_blocks(graph)
    if name == "blocks":
        return replace(strategy, recompute=blocks, recompute_operators=())
    inside = set(graph.operators_of(blocks))
    again = recomputed_operators(graph, name) & inside
    copies = copies_kept(graph, inside) if name == "selective" else ()
    return replace(
        strategy, recompute=(), recompute_operators=tuple(sorted(again)), reshard_again=copies
    )


def copies_kept(graph: OperatorGraph, readers: Container[int]) -> tuple[int, ...]:
    """Return the activations read by these operators only of which autograd would keep a copy in
    another layout.
    """
    storage = storages(graph)
    kept = _kept_by_autograd(graph, storage)
    return tuple(
        tensor
        for tensor, spec in enumerate(graph.tensors)
        if spec.producer >= 0
        and storage[tensor] in kept
        and all(reader in readers for reader in graph.consumers[tensor])
    )


def recomputed_operators(graph: OperatorGraph, name: Recomputation) -> frozenset[int]:
    """Return the operators that run again; those of every block for ``blocks``."""
    if name == "blocks":
        return frozenset(range(len(graph.operators)))
    if name == "selective":
        return _selective(graph)
    return _attention_cores(graph) if name == "attention" else frozenset()


def needed_again(graph: OperatorGraph, asked: Container[int]) -> frozenset[int]:
    """Return those of the operators asked to run again that some backward of their block needs.

    Recomputation of a block stops where all is there that its backward reads, as PyTorch's
    non-reentrant checkpoint does: of a transformer's block the last product is not run again, since
    only the next block reads its result, and its own backward reads what goes into it. What follows
    keeps its graph from forward, which then holds nothing of its own. In between nothing is left
    out: a segment more costs more than a cheap operator.
    """
    found: set[int] = set()
    for block in graph.blocks:
        idle: list[int] = []
        mine = [index for index in range(block.start, block.stop) if index in asked]
        while mine and not _is_needed(graph, mine[-1], block.stop):
            idle.append(mine.pop())
        # What is only seen anew may stay with what made it.
        while idle and shares_storage(graph, graph.operators[idle[-1]]):
            mine.append(idle.pop())
        found.update(mine)
    return frozenset(found)


def _is_needed(graph: OperatorGraph, index: int, stop: int) -> bool:
    """Whether a backward in its block, which ends at ``stop``, reads what an operator makes."""
    operator = graph.operators[index]
    if saved_tensors(graph, operator)[1] or _saved_bytes(graph, index) > 0:
        return True
    return any(
        _is_read_again(graph, tensor, reader, stop)
        for tensor in operator.outputs
        for reader in graph.consumers[tensor]
        if reader < stop
    )


def _is_read_again(graph: OperatorGraph, tensor: int, reader: int, stop: int) -> bool:
    """Whether the backward of a reader, or of those that read its view of a tensor, reads that."""
    operator = graph.operators[reader]
    if tensor in [operator.inputs[position] for position in saved_tensors(graph, operator)[0]]:
        return True
    is_view = shares_storage(graph, operator) and tensor == operator.inputs[0]
    return is_view and _is_needed(graph, reader, stop)


def leaving(graph: OperatorGraph, storage: Sequence[int]) -> set[int]:
    """Return the storages that blocks hand on, so that they are kept whatever is recomputed."""
    block = graph.block_of
    return {
        storage[tensor]
        for tensor, spec in enumerate(graph.tensors)
        if spec.producer >= 0
        and any(
            block[reader] != block[graph.tensors[storage[tensor]].producer]
            for reader in graph.consumers[tensor]
            if graph.tensors[storage[tensor]].producer >= 0
        )
    }


def _selective(graph: OperatorGraph) -> frozenset[int]:
    """Flag the cheap operators that save at least twice what they make live longer, in one pass.

    Running an operator again needs its operands. Those that autograd keeps anyway cost nothing; of
    the others either the bytes are held, or what made them runs again too, where that is cheap.
    """
    storage = storages(graph)
    stays = leaving(graph, storage)
    saves = _kept_by_autograd(graph, storage)
    saves -= stays
    kept = stays | saves
    flagged: set[int] = set()
    # By storage, the bytes that having it in backward takes beyond what is kept.
    held: dict[int, int] = {}
    passing: set[int] = set()  # storages that are better made again than held
    for index, operator in enumerate(graph.operators):
        roots = {storage[t] for t in operator.inputs if graph.tensors[storage[t]].producer >= 0}
        fresh = [tensor for tensor in operator.outputs if storage[tensor] == tensor]
        price = sum(held[root] for root in roots)
        is_cheap = base_kind(operator.kind) in CHEAP and fresh == list(operator.outputs)
        saved = _saved_bytes(graph, index, saves.intersection(fresh))
        if is_cheap and saved > 0 and saved >= 2 * price:
            flagged |= _with_makers(graph, index, storage, passing)
        for tensor in fresh:
            size = 0 if tensor in kept else graph.tensors[tensor].bytes
            held[tensor] = min(size, price) if is_cheap else size
            if held[tensor] < size:
                passing.add(tensor)
    return frozenset(flagged)


def _kept_by_autograd(graph: OperatorGraph, storage: Sequence[int]) -> set[int]:
    kept: set[int] = set()
    for operator in graph.operators:
        inputs, outputs, _ = saved_tensors(graph, operator)
        kept.update(storage[operator.inputs[position]] for position in inputs)
        kept.update(storage[operator.outputs[position]] for position in outputs)
    return kept


def _saved_bytes(graph: OperatorGraph, index: int, results: Collection[int] = ()) -> int:
    """Return what an operator saves: these of its results, and statistics beside them."""
    operator = graph.operators[index]
    inputs = tuple(graph.tensors[tensor].shape for tensor in operator.inputs)
    outputs = tuple(graph.tensors[tensor].shape for tensor in operator.outputs)
    beside = saved_tensors(graph, operator)[2](inputs, outputs)
    return beside + sum(graph.tensors[tensor].bytes for tensor in results)


def _with_makers(
    graph: OperatorGraph, index: int, storage: Sequence[int], passing: set[int]
) -> set[int]:
    """Return an operator with those that run again before it, rather than that results are held."""
    found: set[int] = set()
    queue = [index]
    while queue:
        at = queue.pop()
        found.add(at)
        roots = {storage[tensor] for tensor in graph.operators[at].inputs} & passing
        queue += [graph.tensors[root].producer for root in roots]
    return found


def _attention_cores(graph: OperatorGraph) -> frozenset[int]:
    """Flag fused attention that keeps scores, and what lies from their product to their use."""
    block = graph.block_of
    flagged: set[int] = set()
    for index, operator in enumerate(graph.operators):
        bare = base_kind(operator.kind)
        if bare == "scaled_dot_product_attention" and operator.attribute("dropout_p", 0.0):
            flagged.add(index)
        core = _to_product(graph, index, block) if bare in SOFTMAX else set[int]()
        if core:
            flagged |= core | _uses(graph, index, block)
    return frozenset(flagged)


def _to_product(graph: OperatorGraph, index: int, block: Sequence[int]) -> set[int]:
    """Return what lies in a softmax's block from products of scores to it, none if there is no product."""
    core, products = {index}, 0
    queue = graph.makers(index)
    while queue:
        maker = queue.pop()
        if maker in core or block[maker] != block[index]:
            continue
        is_product = base_kind(graph.operators[maker].kind) in SCORES
        if is_product or _passes(graph, maker):
            core.add(maker)
            products += is_product
            queue += [] if is_product else graph.makers(maker)
    return core if products else set()


def _uses(graph: OperatorGraph, index: int, block: Sequence[int]) -> set[int]:
    """Return what lies between the scores and the product that uses them."""
    found: set[int] = set()
    queue = [
        reader for tensor in graph.operators[index].outputs for reader in graph.consumers[tensor]
    ]
    while queue:
        reader = queue.pop()
        if reader not in found and block[reader] == block[index] and _passes(graph, reader):
            found.add(reader)
            queue += [r for t in graph.operators[reader].outputs for r in graph.consumers[t]]
    return found


def _passes(graph: OperatorGraph, index: int) -> bool:
    """Whether an operator only works on scores as they pass: a scale, a mask, dropout, a view."""
    operator = graph.operators[index]
    bare = base_kind(operator.kind)
    trained = any(graph.tensors[tensor].needs_gradient for tensor in operator.inputs)
    return trained and (bare in CHEAP or is_view(bare))
