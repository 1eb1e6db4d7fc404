"""Decoders by their dimensions, captured shallow and deepened."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from shardwright.core.cluster import Cluster
from shardwright.core.costs import CostTable
from shardwright.core.decoder import Decoder
from shardwright.core.graph import OperatorGraph
from shardwright.files.clusterfile import parse_cluster
from shardwright.planner.lower import lower
from shardwright.planner.search import Context, Training, as_strategy, evaluate_closely
from shardwright.planner.space import Seed
from shardwright.runtime.capture import decoder as module
from shardwright.runtime.capture.decoder import capture_decoder

pytestmark = pytest.mark.torch

SMALL = Decoder(
    layers=5, hidden=64, heads=4, kv_heads=4, head_size=16, ffn=128, vocab=256, seq=32, tied=True,
    positions=True,
)  # fmt: skip
LLAMA = replace(
    SMALL, kv_heads=2, gated=True, activation="silu", rms=True, rotary=True, tied=False,
    positions=False,
)  # fmt: skip
EXPERTS = replace(LLAMA, experts=4, topk=2, shared=64)
EAGER = replace(EXPERTS, stepwise=True, qk_norm=True, sorts=True, grouped="triton", fused=False)
CLUSTER: Cluster = parse_cluster("2x4xA100")


def whole(shape: Decoder, monkeypatch: pytest.MonkeyPatch) -> OperatorGraph:
    with monkeypatch.context() as patch:
        patch.setattr(module, "FEWEST_LAYERS", shape.layers)
        return capture_decoder(shape, 16, "bfloat16")


def described(graph: OperatorGraph) -> list[object]:
    """Return what a price may depend on: kinds, shapes, who reads what of whom."""
    place = {t: (i, n) for i, o in enumerate(graph.operators) for n, t in enumerate(o.outputs)}
    return [
        (
            operator.kind, operator.flops, operator.block, operator.attributes,
            [graph.tensors[t].shape for t in (*operator.inputs, *operator.outputs)],
            [place.get(t, graph.tensors[t].role) for t in operator.inputs],
            [len(graph.consumers[t]) for t in operator.inputs],
        )
        for operator in graph.operators
    ]  # fmt: skip


@pytest.mark.parametrize("shape", [SMALL, replace(LLAMA, adapters=8)], ids=["gpt", "adapters"])
def test_a_deepened_graph_is_the_one_of_the_deep_model(
    shape: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep, shown = whole(shape, monkeypatch), capture_decoder(shape, 16, "bfloat16")
    assert described(shown) == described(deep)
    assert shown.num_parameters == deep.num_parameters
    assert [block.signature for block in shown.blocks] == [one.signature for one in deep.blocks]
    names = [tensor.name for tensor in shown.tensors if tensor.role == "parameter"]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("shape", [SMALL, EAGER, replace(LLAMA, flash=False, fused=False)])
def test_the_dimensions_tell_the_parameters(shape: Decoder) -> None:
    graph = capture_decoder(shape, 16, "bfloat16")
    few = sum(  # norms and routers, which the formula leaves out
        graph.tensors[i].numel
        for i in graph.parameters
        if len(graph.tensors[i].shape) == 1 or graph.tensors[i].shape == (4, 64)
    )
    assert graph.num_parameters == shape.num_parameters + few


def test_eager_decoders_run_norms_step_by_step_and_experts_by_triton() -> None:
    kinds = [one.kind for one in capture_decoder(EAGER, 16, "bfloat16").operators]
    assert (
        kinds.count("aten.square.default") == 4 * EAGER.layers + 1
    )  # two of each layer are of heads
    assert "aten.rms_norm.default" not in kinds
    assert kinds.count("aten.flip.default") == EAGER.layers
    made_by = {
        one.attribute("kernel")
        for shape in (EAGER, EXPERTS)
        for one in capture_decoder(shape, 16, "bfloat16").operators
        if one.kind == "aten.einsum.default"
    }
    assert made_by == {"triton", "cutlass"}


def test_tokens_that_do_not_divide_by_experts_are_rounded_up() -> None:
    graph = capture_decoder(replace(EXPERTS, layers=1, experts=6), 16, "bfloat16")
    routed = [graph.tensors[one.inputs[0]].shape for one in graph.operators if "einsum" in one.kind]
    assert [shape[:3] for shape in routed] == [(16, 11, 6)] * 2  # 32 tokens, each to 2 of 6


def test_only_adapters_are_trained() -> None:
    graph = capture_decoder(replace(LLAMA, adapters=8), 16, "bfloat16")
    trained = [i for i in graph.parameters if graph.tensors[i].needs_gradient]
    each = 8 * ((64 + 64) + (64 + 64))  # queries, and keys with values
    assert sum(graph.tensors[i].numel for i in trained) == 5 * each


@pytest.mark.parametrize("shape", [LLAMA, replace(LLAMA, kv_heads=4)])
def test_a_linear_and_its_adapter_are_split_together(shape: Decoder) -> None:
    """Their results are added, so both have their features split or neither."""
    graph = capture_decoder(replace(shape, adapters=8), 16, "bfloat16")
    context = Context.of(graph, CLUSTER, CostTable(), Training(precision="bfloat16"))
    strategy = as_strategy(context, Seed(data=4, tensor=2))
    axis = strategy.meshes[0].axes.index("tensor")
    places: dict[str, set[object]] = {}
    for tensor, kept in zip(graph.parameters, strategy.parameters, strict=True):
        spec = graph.tensors[tensor]
        split = kept.rest[axis]
        from_end = split - len(spec.shape) if isinstance(split, int) else split
        places.setdefault(spec.name.split(".")[-2], set()).add(from_end)
    assert places["plain"] == places["outer"] == {-2}  # features of the result
    assert places["out"] == {-1}


def test_experts_lie_apart_and_so_do_their_states() -> None:
    graph = capture_decoder(EXPERTS, 16, "bfloat16")
    context = Context.of(graph, CLUSTER, CostTable(), Training(precision="bfloat16"))
    plain = as_strategy(context, Seed(data=8))
    apart = as_strategy(context, Seed(data=2, expert=4))
    products = [i for i, o in enumerate(graph.operators) if o.kind == "aten.einsum.default"]
    assert len(products) == 2 * 5
    names = {apart.configs[i].dims[apart.meshes[0].axes.index("expert")] for i in products}
    assert names == {"e"}
    held = 5 * 4 * 3 * 64 * 128 * (4 + 8 + 2)  # masters, states and weights of all experts
    saved = evaluate_closely(context, plain)[2].bytes - evaluate_closely(context, apart)[2].bytes
    assert saved >= 0.7 * held * 3 / 4


@pytest.mark.parametrize(
    "seed",
    [
        Seed(data=2, expert=2, tensor=2, sequence=True, experts_over=("tensor",)),
        Seed(data=4, context=2, experts_over=("context",)),
        Seed(data=2, context=2, tensor=2, experts_over=("context", "tensor")),
    ],
    ids=lambda seed: seed.label,
)
def test_experts_lie_over_other_axes_too(seed: Seed) -> None:
    """Tokens go to them from all of these axes, and none of their weights is there twice."""
    graph = capture_decoder(EXPERTS, 16, "bfloat16")
    context = Context.of(graph, CLUSTER, CostTable(), Training(precision="bfloat16"))
    strategy = as_strategy(context, seed)
    axes = strategy.meshes[0].axes
    mine = {"expert", *seed.experts_over} & {*axes}
    for index, operator in enumerate(graph.operators):
        if operator.kind == "aten.einsum.default":
            split = {
                axis
                for axis, name in zip(axes, strategy.configs[index].dims, strict=True)
                if name == "e"
            }
            assert split == mine
    program = lower(graph, strategy)
    tables = [t for t in graph.parameters if graph.tensors[t].name.endswith((".up", ".down"))]
    pieces = {value.shape[0] for value in program.values if value.tensor in tables}
    assert pieces == {EXPERTS.experts // seed.expert_pieces}
    assert any(message.primitive == "all_to_all" for message in program.messages)


@pytest.mark.parametrize(
    ("seed", "expected"),
    [
        (Seed(data=4, expert=2), {"all_to_all": 4}),
        (Seed(data=8), {}),
        (Seed(data=4, context=2), {}),
        (Seed(data=2, expert=2, tensor=2, sequence=True), {"all_to_all": 4, "all_gather": 2, "reduce_scatter": 2}),
        (Seed(data=4, tensor=2, sequence=True), {"all_gather": 2, "reduce_scatter": 2}),
        (Seed(data=4, tensor=2, sequence=True, experts_over=("tensor",)), {"all_to_all": 4}),
        (Seed(data=2, expert=2, tensor=2, sequence=True, experts_over=("tensor",)), {"all_to_all": 8}),
    ],
    ids=lambda one: one.label if isinstance(one, Seed) else "",
)  # fmt: skip
def test_tokens_travel_to_experts_as_megatron_sends_them(
    seed: Seed, expected: dict[str, int]
) -> None:
    """There and back, forward and backward: all-to-all over the devices among which experts lie apart, a gathering
    and a reduction where each is split inside. Nothing but copies of tokens travels, and they do once."""
    graph = capture_decoder(EXPERTS, 16, "bfloat16")
    context = Context.of(graph, CLUSTER, CostTable(), Training(precision="bfloat16"))
    program = lower(graph, as_strategy(context, seed))
    routed = {  # tokens in order of their experts, and what these make of them
        tensor
        for operator in graph.operators
        if operator.kind == "aten.einsum.default"
        for tensor in (*operator.inputs, *operator.outputs)
        if graph.tensors[tensor].producer >= 0
    }
    found = Counter[str]()
    for message in program.messages:
        if message.sources and program.values[message.sources[0]].tensor in routed:
            found[message.primitive] += 1
            assert program.values[message.sources[0]].shape[-1] == EXPERTS.hidden
    assert found == {kind: 5 * count for kind, count in expected.items()}


def test_an_embedding_is_split_with_the_scores_that_are_cast_before_the_loss() -> None:
    """Megatron-LM splits the vocabulary of both, with and without sequence parallelism."""
    graph = capture_decoder(LLAMA, 16, "bfloat16")
    context = Context.of(graph, CLUSTER, CostTable(), Training(precision="bfloat16"))
    tables = [place for place, t in enumerate(graph.parameters) if 256 in graph.tensors[t].shape]
    assert len(tables) == 2
    for is_sequence in (False, True):
        strategy = as_strategy(context, Seed(data=4, tensor=2, sequence=is_sequence))
        axis = strategy.meshes[0].axes.index("tensor")
        assert [strategy.parameters[place].rest[axis] for place in tables] == [0, 0]


@pytest.mark.parametrize(
    ("shape", "products"),
    [(SMALL, 4), (LLAMA, 4), (replace(LLAMA, apart=True), 7)],
    ids=["equal heads", "shared keys", "apart"],
)
def test_queries_keys_and_values_are_one_product_or_three(shape: Decoder, products: int) -> None:
    graph = capture_decoder(shape, 16, "bfloat16")
    found = [one for one in graph.operators if "linear" in one.kind]
    assert len(found) == shape.layers * products + 1  # and the scores
    weights = sum(graph.tensors[one.inputs[1]].numel for one in found)
    tables = shape.vocab * (0 if shape.tied else 1) + (shape.seq if shape.positions else 0)
    assert weights == shape.num_parameters - shape.hidden * tables
