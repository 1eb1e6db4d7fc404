"""What chains of element-wise operators read and write where they are one kernel."""

from __future__ import annotations

from shardwright.core.graph import Operator, OperatorGraph, TensorSpec
from shardwright.operators.counting.fusion import passing


def chain(*steps: tuple[str, tuple[int, ...]]) -> OperatorGraph:
    """A graph with the input 0, a weight 1, and one result per step, from 2 on."""
    tensors = [
        TensorSpec(name="x", shape=(8, 8), dtype="float32", role="input"),
        TensorSpec(name="w", shape=(8, 8), dtype="float32", role="parameter", needs_gradient=True),
    ]
    operators = []
    for index, (kind, inputs) in enumerate(steps):
        operators.append(
            Operator(
                name=f"o{index}", kind=f"aten.{kind}.default", inputs=inputs,
                input_names=("input", "other")[: len(inputs)], outputs=(2 + index,),
            )
        )  # fmt: skip
        tensors.append(
            TensorSpec(name=f"y{index}", shape=(8, 8), dtype="float32", role="activation",
                       producer=index, needs_gradient=True)
        )  # fmt: skip
    return OperatorGraph(
        name="g", tensors=tuple(tensors), operators=tuple(operators), blocks=(),
        loss=len(tensors) - 1,
    )  # fmt: skip


def test_only_the_ends_of_a_chain_between_products_touch_memory():
    graph = chain(("linear", (0, 1)), ("silu", (2,)), ("mul", (3, 2)), ("linear", (4, 1)))
    first, silu, mul, last = passing(graph)
    assert first is None
    assert last is None
    assert (silu.inputs, silu.outputs) == ((True,), (False,))
    assert (mul.inputs, mul.outputs) == ((False, False), (True,))  # read once for both


def test_a_result_that_is_read_behind_a_product_is_written():
    graph = chain(("linear", (0, 1)), ("silu", (2,)), ("linear", (3, 1)), ("add", (4, 3)))
    _, silu, _, add = passing(graph)
    assert silu.outputs == (True,)
    assert add.inputs == (True, True)


def test_a_kernel_that_stands_apart_is_written_and_read_by_the_next():
    graph = chain(("matmul", (0, 1)), ("softmax", (2,)), ("dropout", (3,)), ("matmul", (4, 1)))
    _, softmax, dropout, _ = passing(graph)
    assert softmax.outputs == dropout.inputs == (False,)
    _, softmax, dropout, _ = passing(graph, frozenset({"softmax"}))
    assert softmax is None
    assert (dropout.inputs, dropout.outputs) == ((True,), (True,))
