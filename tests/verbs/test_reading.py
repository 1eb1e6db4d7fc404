"""Which memory a published run means, and that its prediction is read alike."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from shardwright.core.costs import CostTable
from shardwright.core.graph import OperatorGraph
from shardwright.core.strategy import Strategy
from shardwright.planner.search import Context, as_strategy, evaluate_closely
from shardwright.verbs.expression import Expression, express
from shardwright.verbs.reading import BUCKET_BYTES, Predicted, Reading, read, reading_of
from tests.verbs.test_expression import RUN


@pytest.mark.parametrize(
    ("text", "kind", "where"),
    [
        ("", "allocated", "fullest"),
        ("torch max allocated on the last rank", "allocated", "last"),
        ("max over ranks, torch allocator active peak (GiB)", "allocated", "fullest"),
        ("max_memory_reserved, worst rank", "reserved", "fullest"),
        ("nvidia-smi GB", "device", "first host"),
        ("nvidia-smi, max over GPUs", "device", "fullest"),
    ],
)
def test_a_reading_says_what_was_read_and_where(text: str, kind: str, where: str) -> None:
    found = reading_of(replace(RUN, mem_kind=text), "in place")
    assert (found.kind, found.where) == (kind, where)


def test_frameworks_have_buffers_and_streams_of_their_own() -> None:
    assert (
        reading_of(replace(RUN, framework="Megatron-DeepSpeed"), "in place").buffers == BUCKET_BYTES
    )
    assert reading_of(RUN, "in place").buffers == 0
    assert reading_of(replace(RUN, sharding="FSDP2"), "in place").streams


def test_torchtitans_eager_loss_is_read_with_one_copy_of_the_scores_more() -> None:
    titan = replace(RUN, framework="torchtitan")
    assert reading_of(titan, "log_softmax").copies_scores
    assert not reading_of(titan, "compiled").copies_scores
    assert not reading_of(RUN, "log_softmax").copies_scores


SMALL: dict[str, Any] = {
    "layers": 4, "hidden": 1024, "heads": 8, "kv_heads": 8, "ffn_hidden": 4096, "seq": 1024,
    "params_b": None, "global_batch": 16, "gpus": 4, "gpus_per_node": 2, "tp": 1, "dp": 2,
}  # fmt: skip


@cache
def small() -> tuple[Expression, OperatorGraph]:
    from shardwright.runtime.capture.decoder import capture_decoder

    said = express(replace(RUN, **SMALL))
    return said, capture_decoder(said.decoder, said.global_batch, said.precision)


def planned(memory: float = 80.0) -> tuple[Context, Strategy, tuple[float, ...]]:
    said, graph = small()
    kinds = (replace(said.cluster.kinds[0], memory_bytes=memory * 2**30),)
    context = Context.of(graph, replace(said.cluster, kinds=kinds), CostTable(), said.training)
    strategy = as_strategy(context, said.seeds[0])
    return context, strategy, evaluate_closely(context, strategy)[2].stage_bytes


@pytest.mark.torch
def test_deepspeeds_last_stage_keeps_the_scores_of_the_microbatch_before() -> None:
    assert reading_of(replace(RUN, framework="Megatron-DeepSpeed"), "in place").keeps_scores
    assert not reading_of(RUN, "in place").keeps_scores
    context, strategy, tensors = planned()
    plain, keeping = (
        read(Reading(where="last", keeps_scores=keeps), context, strategy, tensors).bytes
        for keeps in (False, True)
    )
    samples = 16 // (2 * strategy.pipeline.num_microbatches)  # of a batch of 16, on two replicas
    assert keeping - plain == samples * 1024 * 32000 * 4  # float32


def predicted(reading: Reading, memory: float = 80.0) -> Predicted:
    return read(reading, *planned(memory))


@pytest.mark.torch
def test_each_reading_counts_more_than_the_one_before() -> None:
    allocated, reserved, device = (
        predicted(Reading(kind=kind)).bytes for kind in ("allocated", "reserved", "device")
    )
    assert allocated < reserved
    # The context, and two communicators: of data within a host, of the pipeline between two.
    assert 2**29 < device - reserved < 2.5 * 2**30
    last, first = (
        predicted(Reading(kind="device", where=where)).bytes for where in ("last", "first host")
    )
    assert device == max(last, first)
    assert last != first


@pytest.mark.torch
def test_what_the_driver_holds_decides_whether_a_run_fits() -> None:
    tensors = predicted(Reading()).bytes / 2**30
    assert not predicted(Reading(), memory=tensors + 0.4).fits
    assert predicted(Reading(), memory=tensors + 3).fits
    buffers = Reading(buffers=4 * 2**30)
    assert not predicted(buffers, memory=tensors + 3).fits
