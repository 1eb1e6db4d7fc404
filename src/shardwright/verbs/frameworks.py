"""What published software does that no search would: how it cuts layers into stages, and what it runs again."""

from __future__ import annotations

from dataclasses import replace

from shardwright.core.graph import OperatorGraph
from shardwright.core.strategy import Strategy
from shardwright.operators.derivatives import base_kind
from shardwright.planner.cost.recomputation import copies_kept
from shardwright.planner.space.seeds import repeated_blocks

# Which ends of a model count as a block where stages have equally many: none, the last, both.
EVEN_WITH = ((0, 0), (0, 1), (1, 1))
PRODUCTS = frozenset({"linear", "addmm", "mm"})


def even_stages(graph: OperatorGraph, stages: int) -> list[int] | None:
    """Cut the repeated blocks into stages of equally many, whatever the ends of the model take: one
    stage number per operator. Where what comes before and behind them makes the number even, each
    counts as a block. None where neither is.

    So frameworks cut; nothing is gained by it.
    """
    repeated = repeated_blocks(graph)
    if stages < 2 or not repeated:
        return None
    first, last = repeated[0], repeated[-1]
    padding = next((pad for pad in EVEN_WITH if (len(repeated) + sum(pad)) % stages == 0), None)
    if padding is None:
        return None
    each = (len(repeated) + sum(padding)) // stages
    result: list[int] = []
    for number, block in enumerate(graph.blocks):
        place = min(max(number, first), last) - first + padding[0]
        result += [place // each] * (block.stop - block.start)
    return result


def with_alternate_products(graph: OperatorGraph, strategy: Strategy) -> Strategy:
    """Return the strategy recomputing in every repeated block all but fused attention and its first,
    third, fifth product and so on: torchtitan's selective activation checkpointing by operator."""
    again: list[int] = []
    for number in repeated_blocks(graph):
        inside = range(graph.blocks[number].start, graph.blocks[number].stop)
        kinds = {index: base_kind(graph.operators[index].kind) for index in inside}
        kept = {index for index in inside if kinds[index] == "scaled_dot_product_attention"}
        kept.update([index for index in inside if kinds[index] in PRODUCTS][::2])
        again += [index for index in inside if index not in kept]
    return replace(strategy, recompute=(), recompute_operators=tuple(again))


def with_copies_again(graph: OperatorGraph, strategy: Strategy) -> Strategy:
    """Return the strategy sending again, before backward, what repeated blocks keep in another layout."""
    inside = set(graph.operators_of(repeated_blocks(graph)))
    return replace(strategy, reshard_again=copies_kept(graph, inside))
