"""Expert parallelism as a choice of dims: experts over the devices which elsewhere split the batch.

Where the tokens of all experts are made ``g.. -> e g..`` (GShard, arXiv:2006.16668, algorithm 1) the
operators between are split over the experts, and what leads there and back is a re-layout from
samples to experts: one all-to-all each way.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.core.graph import OperatorGraph
from shardwright.operators.splitting.iteration import Iteration

PRODUCTS = frozenset({"aten.einsum.default", "aten.bmm.default", "aten.matmul.default"})


def expert_dims(
    graph: OperatorGraph, iterations: Sequence[Iteration], pieces: int
) -> dict[int, str]:
    """Return the experts' dim of every operator that works on each expert's tokens by itself.

    A product with a parameter that shares a dim with the tokens and the result opens; the dim is
    followed through operators all of whose activations have it, until one lacks it.
    """
    lying: dict[int, int] = {}  # activation -> where its experts lie
    found: dict[int, str] = {}
    for index, operator in enumerate(graph.operators):
        iteration = iterations[index]
        made = [t for t in operator.inputs if graph.tensors[t].producer >= 0]
        known = iteration.met(operator.inputs, lying) if lying.keys() >= set(made) else []
        name = next(iter(known), "") or _own_experts(graph, iteration, index)
        if name and iteration.dim(name).size % pieces == 0 and not iteration.is_reduction(name):
            found[index] = name
            lying |= iteration.handed_on(operator.outputs, name)
    return found


def _own_experts(graph: OperatorGraph, iteration: Iteration, index: int) -> str:
    """Return the dim that a product's activation, parameter and result all have."""
    operator = graph.operators[index]
    trained = [graph.tensors[tensor].role == "parameter" for tensor in operator.inputs]
    if operator.kind not in PRODUCTS or not any(trained) or all(trained):
        return ""
    tensors = (*iteration.inputs, *iteration.outputs)
    shared = [name for name in iteration.outputs[0] if name and all(name in n for n in tensors)]
    return shared[0] if shared else ""


def inner_dims(
    graph: OperatorGraph, iterations: Sequence[Iteration], experts: dict[int, str], pieces: int
) -> dict[int, str]:
    """Split each expert as Megatron splits a feed-forward layer: features, then their sum."""
    lying: dict[int, int] = {}  # activation -> where its split features lie
    found: dict[int, str] = {}
    for index in experts:
        operator, iteration = graph.operators[index], iterations[index]
        names = iteration.met(operator.inputs, lying)
        name = names[0] if names else _own_features(graph, iteration, index)
        if name and iteration.dim(name).size % pieces == 0:
            found[index] = name
            lying |= iteration.handed_on(operator.outputs, name)
    return found


def _own_features(graph: OperatorGraph, iteration: Iteration, index: int) -> str:
    """Return the last dim of a product where only the parameter brings it."""
    operator = graph.operators[index]
    name = iteration.outputs[0][-1]
    brings = [
        graph.tensors[tensor].role == "parameter"
        for tensor, names in zip(operator.inputs, iteration.inputs, strict=True)
        if name in names
    ]
    return name if operator.kind in PRODUCTS and brings and all(brings) else ""
