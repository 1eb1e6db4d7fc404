"""Lowering: the communication of named strategies, and laws every Program must keep."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from shardwright.core.graph import Block, Constant, Operator, OperatorGraph, TensorSpec
from shardwright.core.program import Kind, Program
from shardwright.core.strategy import GradientSync, Strategy
from shardwright.operators.splitting import find_samples
from shardwright.planner.lower import lower
from shardwright.planner.space import Seed, seed_strategy
from shardwright.proofs import check

HIDDEN, BATCH, LENGTH = 16, 8, 4

ATTRIBUTES: dict[str, tuple[tuple[str, Constant], ...]] = {
    "aten.sum.dim_IntList": (("dim", (1,)), ("keepdim", False)),
    "shardwright.cross_entropy_sum": (("ignore_index", -100), ("label_smoothing", 0.0)),
    "shardwright.count_targets": (("ignore_index", -100),),
}


def transformer_like(layers: int = 2) -> OperatorGraph:
    """A residual stack of two linears with a nonlinearity, an embedding before and a loss behind."""
    tensors: list[TensorSpec] = []
    operators: list[Operator] = []
    blocks: list[Block] = []

    def outside(name: str, shape: tuple[int, ...], role: str, dtype: str = "float32") -> int:
        trained = role == "parameter"
        tensors.append(
            TensorSpec(name=name, shape=shape, dtype=dtype, role=role, needs_gradient=trained)  # type: ignore[arg-type]
        )
        return len(tensors) - 1

    def call(
        kind: str, inputs: dict[str, int], shape: tuple[int, ...], trained: bool = True
    ) -> int:
        tensors.append(
            TensorSpec(
                name=f"t{len(operators)}",
                shape=shape,
                dtype="float32",
                role="activation",
                producer=len(operators),
                needs_gradient=trained,
            )
        )
        operators.append(
            Operator(
                name=f"op{len(operators)}",
                kind=kind,
                inputs=tuple(inputs.values()),
                input_names=tuple(inputs),
                outputs=(len(tensors) - 1,),
                attributes=ATTRIBUTES.get(kind, ()),
                flops=1.0,
            )
        )
        return len(tensors) - 1

    tokens = outside("tokens", (BATCH, LENGTH), "input", "int64")
    labels = outside("labels", (BATCH,), "input", "int64")
    stream = (BATCH, LENGTH, HIDDEN)
    table = outside("table", (32, HIDDEN), "parameter")
    x = call("aten.embedding.default", {"weight": table, "indices": tokens}, stream)
    blocks.append(Block(name="head", start=0, stop=len(operators), signature="e"))
    for layer in range(layers):
        begin = len(operators)
        up = outside(f"up{layer}", (4 * HIDDEN, HIDDEN), "parameter")
        down = outside(f"down{layer}", (HIDDEN, 4 * HIDDEN), "parameter")
        h = call("aten.linear.default", {"input": x, "weight": up}, (BATCH, LENGTH, 4 * HIDDEN))
        h = call("aten.gelu.default", {"self": h}, (BATCH, LENGTH, 4 * HIDDEN))
        h = call("aten.linear.default", {"input": h, "weight": down}, stream)
        x = call("aten.add.Tensor", {"self": x, "other": h}, stream)
        blocks.append(Block(name=f"layer{layer}", start=begin, stop=len(operators), signature="l"))
    begin = len(operators)
    pooled = call("aten.sum.dim_IntList", {"self": x}, (BATCH, HIDDEN))
    total = call("shardwright.cross_entropy_sum", {"input": pooled, "target": labels}, ())
    count = call("shardwright.count_targets", {"target": labels}, (), trained=False)
    loss = call("aten.div.Tensor", {"self": total, "other": count}, ())
    blocks.append(Block(name="tail", start=begin, stop=len(operators), signature="t"))
    return OperatorGraph(
        name="toy",
        tensors=tuple(tensors),
        operators=tuple(operators),
        blocks=tuple(blocks),
        loss=loss,
    )


def messages(program: Program) -> Counter[tuple[str, str]]:
    return Counter((message.primitive, message.purpose) for message in program.messages)


SEEDS = [
    Seed(),
    Seed(data=2),
    Seed(data=4, zero=1),
    Seed(data=2, zero=2, num_microbatches=2),
    Seed(data=2, zero=3, num_microbatches=4),
    Seed(tensor=2),
    Seed(data=2, tensor=2, zero=3),
    Seed(tensor=2, sequence=True),
    Seed(stages=2, num_microbatches=4),
    Seed(stages=4, num_microbatches=8, schedule="gpipe", recompute=True),
    Seed(stages=2, data=2, tensor=2, zero=1, num_microbatches=2, recompute=True),
]


@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: seed.label)
def test_predecessors_come_first_and_every_value_read_was_written(seed: Seed) -> None:
    graph = transformer_like()
    program = lower(graph, seed_strategy(graph, seed))
    rows = program.offset
    for index in range(program.num_instructions):
        before = program.predecessor[rows[index] : rows[index + 1]]
        assert (before < index).all()
    written: set[tuple[int, int]] = set()
    outside = {"input", "buffer"}
    for index in range(program.num_instructions):
        microbatch = int(program.microbatch[index])
        reads, writes = touched(program, index)
        for value in reads:
            entry = program.values[value]
            while entry.alias >= 0:
                value, entry = entry.alias, program.values[entry.alias]
            seeded = value == program.values[program.loss].gradient
            if entry.role in outside or entry.resident or seeded:
                continue
            place = microbatch if entry.scope == "microbatch" else -1
            assert (value, place) in written, (program.describe(index), entry)
        for value in writes:
            place = microbatch if program.values[value].scope == "microbatch" else -1
            written.add((value, place))


def touched(program: Program, index: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    kind, item = Kind(int(program.kind[index])), int(program.item[index])
    values = program.values
    if kind in (Kind.FORWARD, Kind.RECOMPUTE):
        return program.segments[item].inputs, program.segments[item].outputs
    if kind is Kind.BACKWARD:
        segment = program.segments[item]
        reads = [values[v].gradient for v in segment.outputs if values[v].gradient >= 0]
        writes = [values[v].gradient for v in segment.inputs if values[v].gradient >= 0]
        return tuple(reads), tuple(writes)
    if kind is Kind.MESSAGE:
        return program.messages[item].sources, program.messages[item].results
    if kind is Kind.SEND:
        return program.messages[item].sources, ()
    if kind is Kind.RECEIVE:
        return (), program.messages[item].results
    return (), ()


@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: seed.label)
def test_all_bytes_allocated_in_a_step_are_freed_in_it(seed: Seed) -> None:
    graph = transformer_like()
    program = lower(graph, seed_strategy(graph, seed))
    for mesh in range(len(program.meshes)):
        mine = program.group == mesh
        alive = (program.allocated[mine] - program.freed[mine]).cumsum()
        assert alive.min() >= 0
        assert alive[-1] == 0


def test_megatron_needs_two_all_reduces_per_layer_and_direction_pair() -> None:
    graph = transformer_like(layers=3)
    found = messages(lower(graph, seed_strategy(graph, Seed(tensor=2))))
    assert found["all_reduce", "activation"] == 3
    assert found["all_reduce", "gradient"] == 3
    assert found["all_gather", "activation"] == 0


def test_zero_stages_send_what_the_paper_says() -> None:
    graph = transformer_like()
    plain = messages(lower(graph, seed_strategy(graph, Seed(data=2))))
    first = messages(lower(graph, seed_strategy(graph, Seed(data=2, zero=1))))
    third = messages(lower(graph, seed_strategy(graph, Seed(data=2, zero=3))))
    assert plain["all_reduce", "synchronise"]
    assert not plain["all_gather", "parameter"]
    assert first["reduce_scatter", "synchronise"]
    assert first["all_gather", "parameter"]
    assert not first["all_reduce", "synchronise"]
    # ZeRO-3 gathers before forward and again before backward: twice as many as ZeRO-1.
    assert third["all_gather", "parameter"] == 2 * first["all_gather", "parameter"]


def test_zero_shards_the_bytes_at_rest() -> None:
    graph = transformer_like()
    sizes = [
        lower(graph, seed_strategy(graph, Seed(data=4, zero=stage))).base_bytes[0]
        for stage in (0, 1, 3)
    ]
    parameters = sum(graph.tensors[tensor].bytes for tensor in graph.parameters)
    assert sizes[0] == parameters * 3  # parameters and two AdamW states
    assert sizes[1] == parameters * (1 + 3 / 4)  # and a master shard
    assert sizes[2] == parameters * 3 / 4


def test_a_pipeline_sends_one_activation_and_one_gradient_per_cut_and_microbatch() -> None:
    graph = transformer_like()
    program = lower(graph, seed_strategy(graph, Seed(stages=4, num_microbatches=8)))
    assert messages(program)["transfer", "activation"] == 3
    assert messages(program)["transfer", "gradient"] == 3
    assert int((program.kind == Kind.SEND).sum()) == 2 * 3 * 8


def test_gradients_are_synchronised_once_per_step_unless_zero_two() -> None:
    graph = transformer_like()

    def count(zero: int) -> int:
        seed = Seed(data=2, zero=zero, num_microbatches=4)
        program = lower(graph, seed_strategy(graph, seed))
        return sum(
            program.messages[item].purpose == "synchronise"
            for kind, item in zip(program.kind, program.item, strict=True)
            if kind == Kind.MESSAGE
        )

    assert count(2) == 4 * count(1)


def test_the_count_of_targets_runs_once_before_all_microbatches() -> None:
    graph = transformer_like()
    samples = find_samples(graph)
    kinds = {graph.operators[index].kind for index in samples.prologue}
    assert samples.blocker == ""
    assert kinds == {"shardwright.count_targets"}


def test_a_strategy_of_another_graph_is_refused() -> None:
    strategy = seed_strategy(transformer_like(2), Seed())
    with pytest.raises(ValueError, match="one config per operator"):
        lower(transformer_like(3), strategy)


def test_gradients_leave_before_the_backward_of_what_comes_before_a_segment_start() -> None:
    graph = transformer_like(layers=1)
    whole = replace(seed_strategy(graph, Seed(data=2)), gradient_sync=GradientSync())
    block = graph.blocks[1]
    down = next(
        index
        for index in range(block.start + 1, block.stop)
        if graph.operators[index].kind == "aten.linear.default"
    )
    weight = graph.operators[down].inputs[1]

    def behind(strategy: Strategy) -> tuple[int, list[int]]:
        """Count backward segments, and those behind the message of one weight's gradient."""
        program = lower(graph, strategy)
        check(program)
        backward = np.flatnonzero(program.kind == Kind.BACKWARD)
        sent = [
            int(place)
            for place in np.flatnonzero(program.kind == Kind.MESSAGE)
            for source in program.messages[int(program.item[place])].sources
            if program.values[source].tensor == weight
        ]
        blocks = [program.segments[int(program.item[b])].block for b in backward if b > sent[0]]
        return len(backward), blocks

    count, later = behind(whole)
    cut, after = behind(replace(whole, segment_starts=(down,)))
    assert 1 not in later
    assert (cut, after.count(1)) == (count + 1, 1)


def test_nothing_waits_behind_the_further_messages_of_a_synchronisation() -> None:
    """Those wait for the first, and on their axis what backward needs would wait behind them."""
    graph = transformer_like()
    program = lower(graph, seed_strategy(graph, Seed(data=2, tensor=2, sequence=True, zero=1)))
    kinds = [
        (int(place), program.messages[int(program.item[place])])
        for place in np.flatnonzero(program.kind == Kind.MESSAGE)
    ]
    syncs = [(place, message) for place, message in kinds if message.purpose == "synchronise"]
    written = {result for _, message in syncs for result in message.results}
    further = [place for place, message in syncs if written & set(message.sources)]
    assert further, "no gradient is synchronised over both axes, one after the other"
    assert min(further) > max(np.flatnonzero(program.kind == Kind.BACKWARD))


def test_backward_does_not_hold_what_was_only_added() -> None:
    """Tensor parallelism adds products up over devices, and each sum to the residual stream: neither
    gradient needs them, so nothing keeps them once they are added."""
    graph = transformer_like(layers=2)
    program = lower(graph, seed_strategy(graph, Seed(tensor=2)))
    begin = int(np.flatnonzero(program.kind == Kind.BACKWARD)[0])
    summed = {
        value
        for message in program.messages
        if message.primitive == "all_reduce" and message.purpose == "activation"
        for value in message.results
    }
    gone = set(program.free_value[: program.free_offset[begin]].tolist())
    assert len(summed) == 2
    assert summed <= gone
