"""The loss over a vocabulary in two operators: log sums of blocks of scores, and what is made of scores and these."""

from __future__ import annotations

from shardwright.core.graph import Operator, OperatorGraph

LOG_SUMS = "shardwright.vocabulary_logsumexp"
LOSS = "shardwright.vocabulary_cross_entropy_sum"
BLOCKS = 2  # the place of the log sums among what the loss reads


def is_whole(graph: OperatorGraph, operator: Operator, scores: tuple[int, ...]) -> bool:
    """Whether an operator of such a loss gets the scores of all classes on its device.

    Then the loss needs no sums of others: its kernel reads no log sums, and they are not made.
    """
    if operator.kind not in (LOG_SUMS, LOSS):
        return False
    return scores[-1:] == graph.tensors[operator.inputs[0]].shape[-1:]
