"""What the rules call the dims of well-known operators, and which roles they give them."""

from __future__ import annotations

from collections import Counter
from types import ModuleType
from typing import Any

import pytest

from shardwright.core.graph import Operator, OperatorGraph, TensorSpec
from shardwright.operators.splitting import iterate, rules
from shardwright.operators.splitting.iteration import Iteration
from shardwright.verbs import examples

Shape = tuple[int, ...]


def rule_for(kind: str, tensors: dict[str, Shape], output: Shape, **attributes: Any) -> Iteration:
    """Ask for one operator; tensors called weight, w or bias are parameters, indices integers."""
    inputs = [
        TensorSpec(
            name=name,
            shape=shape,
            dtype="int64" if name.startswith(("indices", "target")) else "float32",
            role="parameter" if name in ("weight", "bias") else "input",
        )
        for name, shape in tensors.items()
    ]
    result = TensorSpec(name="y", shape=output, dtype="float32", role="activation", producer=0)
    operator = Operator(
        name="operator",
        kind=kind,
        inputs=tuple(range(len(inputs))),
        input_names=tuple(tensors),
        outputs=(len(inputs),),
        attributes=tuple(attributes.items()),
    )
    graph = OperatorGraph(
        name="one", tensors=(*inputs, result), operators=(operator,), blocks=(), loss=len(inputs)
    )
    return iterate(graph, 0)


def dims(iteration: Iteration) -> dict[str, tuple[int, str]]:
    return {dim.name: (dim.size, dim.role) for dim in iteration.dims}


def test_a_linear_layer_has_samples_positions_columns_and_a_sum() -> None:
    tensors = {"input": (8, 16, 64), "weight": (256, 64), "bias": (256,)}
    iteration = rule_for("aten.linear.default", tensors, (8, 16, 256))
    assert dims(iteration) == {
        "b": (8, "sample"),
        "s": (16, "attribute"),
        "n": (256, "parameter"),
        "k": (64, "reduction"),
    }
    assert iteration.inputs == (("b", "s", "k"), ("n", "k"), ("n",))
    assert iteration.outputs == (("b", "s", "n"),)
    assert iteration.once == (2,)


def test_splitting_a_hidden_dim_into_heads_follows_the_heads() -> None:
    iteration = rule_for(
        "aten.view.default", {"self": (8, 16, 64)}, (8, 16, 4, 16), size=(8, 16, -1, 16)
    )
    assert iteration.inputs == (("d0", "d1", "d2"),)
    assert iteration.outputs == (("d0", "d1", "d2", ""),)
    assert iteration.dim("d2").size == 4
    assert iteration.linear == (0,)


def test_merging_samples_and_positions_can_only_be_split_over_samples() -> None:
    iteration = rule_for("aten.reshape.default", {"self": (8, 16, 64)}, (128, 64), shape=(-1, 64))
    assert iteration.inputs == (("d0", "", "d1"),)
    assert dims(iteration) == {"d0": (8, "sample"), "d1": (64, "attribute")}


def test_grouped_query_attention_splits_into_as_many_heads_as_the_keys_have() -> None:
    tensors = {"query": (2, 32, 16, 8), "key": (2, 8, 16, 8), "value": (2, 8, 16, 8)}
    iteration = rule_for(
        "aten.scaled_dot_product_attention.default",
        tensors,
        (2, 32, 16, 8),
        is_causal=True,
        enable_gqa=True,
    )
    assert dims(iteration) == {"b": (2, "sample"), "h": (8, "attribute"), "q": (16, "attribute")}
    assert iteration.offset == "q"


def test_a_vocabulary_piece_needs_its_offset_unless_a_row_is_padding() -> None:
    tensors = {"weight": (512, 64), "indices": (8, 16)}
    kind, output = "aten.embedding.default", (8, 16, 64)
    assert rule_for(kind, tensors, output).offset == "v"
    padded = rule_for(kind, tensors, output, padding_idx=0)
    assert padded.offset == ""
    assert set(dims(padded)) == {"b", "s", "d"}


def test_a_mean_is_scaled_only_over_the_dims_it_averages() -> None:
    iteration = rule_for("aten.mean.dim", {"self": (8, 16, 64)}, (8, 64), dim=(1,))
    assert iteration.mean == ("d1",)
    assert iteration.dim("d1").role == "reduction"


def test_a_loss_over_all_samples_is_a_reduction_with_the_classes_whole() -> None:
    tensors = {"input": (128, 512), "target": (128,)}
    iteration = rule_for("shardwright.cross_entropy_sum", tensors, ())
    assert dims(iteration) == {"d0": (128, "reduction")}


def test_a_form_that_is_not_understood_runs_whole() -> None:
    looked_up = {"input": (8, 9), "weight": (4, 2, 3)}
    assert rule_for("aten.conv1d.default", looked_up, (4, 7)).dims == ()
    assert rule_for("custom.unknown.default", {"self": (8, 8)}, (8, 8)).dims == ()
    batches = {"x1": (4, 2, 6, 3), "x2": (2, 6, 3)}
    assert rule_for("aten.cdist.default", batches, (4, 2, 6, 6)).dims == ()


def test_equal_calls_share_one_answer() -> None:
    tensors = {"self": (8, 16)}
    first, second = (rule_for("aten.relu.default", tensors, (8, 16)) for _ in range(2))
    assert first is second


@pytest.mark.parametrize(("package", "table"), [(rules, "RULES"), (examples, "EXAMPLES")])
def test_no_table_hides_what_another_says_of_a_kind(package: ModuleType, table: str) -> None:
    parts = [vars(one) for one in vars(package).values() if isinstance(one, ModuleType)]
    counts = Counter(kind for part in parts for kind in part.get(table, {}))
    assert len(counts) > 100
    assert not [kind for kind, count in counts.items() if count > 1]
