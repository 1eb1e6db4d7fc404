"""What autograd keeps of recurrences: of cells, and of layers that run over whole sequences."""

from __future__ import annotations

import math

from shardwright.core.graph import DTYPE_BYTES, Operator, OperatorGraph
from shardwright.operators.derivatives import Rule, Saved, Shapes, recurrence

# Of every layer what runs a recurrence keeps so many times its outputs, and so much before the first step.
KEPT_OF_LAYERS = {"fused": (16.5, 14.4), "LSTM": (8.0, 0.0), "GRU": (8.0, 0.0), "RNN": (2.0, 0.0)}
# What oneDNN's LSTM keeps of every number by which what comes is wider than what is made.
WIDER = 7


def number_bytes(graph: OperatorGraph, operator: Operator) -> int:
    """Return the bytes of a number of the first operand."""
    return DTYPE_BYTES[graph.tensors[operator.inputs[0]].dtype]


def kept_of_cell(states: int) -> Rule:
    """A step of a recurrence that PyTorch composes: all tensors but biases, and so many times its state."""

    def rule(graph: OperatorGraph, operator: Operator, _needs: tuple[bool, ...]) -> Saved:
        size = number_bytes(graph, operator)
        kept = tuple(
            at for at, name in enumerate(operator.input_names) if not name.startswith("b_")
        )
        return kept, (), lambda _i, o: states * size * math.prod(o[0])

    return rule


def kept_of_layers(graph: OperatorGraph, operator: Operator, _needs: tuple[bool, ...]) -> Saved:
    """What kernels keep of every layer, as multiples of its outputs, which are among them: gates and states as PyTorch
    composes them of operators, what oneDNN keeps of an LSTM, states before the first step with it; and of sequences
    whose first dim is samples a copy."""
    floats = tuple(at for at, one in enumerate(operator.inputs) if graph.tensors[one].is_floating)
    layers, size = operator.attribute("num_layers", 1), number_bytes(graph, operator)
    depth = layers if isinstance(layers, int) else 1
    is_first = operator.attribute("batch_first") is True
    kernel = recurrence(graph, operator)
    each, before = KEPT_OF_LAYERS[kernel]
    ways = 2 if operator.attribute("bidirectional") is True else 1
    drops = operator.attribute("dropout", 0.0) not in (0, 0.0)

    def extra(inputs: Shapes, outputs: Shapes) -> int:
        steps = inputs[0][1 if is_first and len(inputs[0]) > 2 else 0]
        made = math.prod(outputs[0])
        width = made // math.prod(outputs[0][:-1]) // ways
        kept = (each + before / max(steps, 1) + drops) * depth - 1 - drops
        copied = math.prod(inputs[0]) if is_first else 0
        if kernel == "fused":  # rows as wide as the wider of what comes and what is made
            came = math.prod(inputs[0]) // math.prod(inputs[0][:-1])
            further = max(came - width, 0) + (depth - 1) * (ways - 1) * width
            copied += WIDER * further * made // width
        return round(size * (kept * made + copied))

    return floats, (0,), extra
