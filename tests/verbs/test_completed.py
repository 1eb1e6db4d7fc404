"""What a row's other cells tell of those that are blank or in other words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwright.files.runs import PublishedRun
from shardwright.verbs.completed import completed, date_in
from shardwright.verbs.dimensions import Inexpressible
from shardwright.verbs.expression import express

# Llama-3-8B as its authors print it.
RUN = PublishedRun(
    row=2, id="a", source_id="s", model="Llama-3-8B", layers=32, hidden=4096, heads=32, kv_heads=8,
    ffn_hidden=14336, ffn_type="swiglu", vocab=128256, seq=8192, params_b=8.03, gpu="H100", gpus=64,
    gpus_per_node=8, intra_bw_gbs=450, inter_bw_gbps_node=3200, sharding="FSDP2", micro_batch=1,
    global_batch=128, precision="bf16", recompute="none", flash_attn="yes", framework="torchtitan",
    software_date="2025-02",
)  # fmt: skip


def said(**cells: Any) -> Any:
    return express(replace(RUN, **cells))


def test_dates_are_read_as_people_write_them() -> None:
    written = {
        "2024-05": "2024-05", "2023-2024": "2023", "2024": "2024", "may 2024": "2024-05",
        "2024/05/01": "2024-05", "nemo 24.07": "2024-07", "22.03": "2022-03", "pytorch 2.5": "2024-10",
        "2025-q1": "2025", "v0.8": "", "": "",
    }  # fmt: skip
    assert {text: date_in(text) for text in written} == written


def test_software_is_no_older_than_its_device_and_its_framework() -> None:
    undated = {"software_date": "", "framework": "", "sharding": "DDP"}
    for cells, date in (
        ({"gpu": "B200"}, "2025"),
        ({"gpu": "H100"}, "2023"),
        ({"gpu": "H100", "framework": "torchtitan"}, "2024"),
        ({"gpu": "A100"}, ""),
        ({"gpu": "A100", "framework": "NeMo 23.05"}, "2023-05"),
    ):
        assert completed(replace(RUN, **{**undated, **cells}), []).software_date == date
    # An H100 without a date runs a fused attention, which an A100 may not.
    flash = [said(**undated, flash_attn="", gpu=gpu).decoder.flash for gpu in ("H100", "A100")]
    assert flash == [True, False]


def test_a_batch_is_in_samples_however_it_is_printed() -> None:
    for cells, batch in (
        ({"global_batch": 128 * 8192 * 16, "micro_batch": None}, 128 * 16),  # tokens
        ({"global_batch": None, "micro_batch": 2, "grad_accum": 3}, 384),
        ({"global_batch": None, "micro_batch": 2}, 128),  # one microbatch
        (
            {"global_batch": None, "micro_batch": 1, "iter_s": 2.0, "tokens_per_s_per_gpu": 8192.0},
            128,
        ),
        ({"global_batch": None, "iter_s": 4.0, "samples_per_s": 64.0}, 256),
    ):
        assert said(**cells).global_batch == batch
    for cells in (
        {"global_batch": None, "micro_batch": 2, "pp": 2},  # a pipeline has several
        {"global_batch": 4_000_001, "micro_batch": None},  # neither samples nor tokens
    ):
        with pytest.raises(Inexpressible):
            said(**cells)


def test_a_degree_may_count_another() -> None:
    assert said(cp=8, dp=64, micro_batch=2).seeds[0].data == 8
    moe = {"experts": 64, "experts_topk": 8, "ffn_hidden": 1024}
    seed = said(ep=8, dp=8, **moe).seeds[0]
    assert (seed.data, seed.expert) == (8, 8)


@pytest.mark.parametrize(
    ("text", "kind", "share"),
    [
        ("every layer", "blocks", 1.0), ("AC=True", "blocks", 1.0), ("1 of 2 layers", "blocks", 0.5),
        ("half of the layers", "blocks", 0.5), ("25 %", "blocks", 0.25), ("SAC", "selective", 1.0),
        ("full, method block, num layers 8", "blocks", 0.25), ("attn", "selective", 1.0),
        ("layernorm + mlp act", "", 0.0), ("selective (layernorm, moe_act)", "", 0.0),
    ],
)  # fmt: skip
def test_words_of_recomputation_mean_layers_or_are_refused(
    text: str, kind: str, share: float
) -> None:
    if not kind:
        with pytest.raises(Inexpressible):
            said(recompute=text)
        return
    found = said(recompute=text)
    assert (found.training.recompute, found.recomputed_share) == (kind, share)


def test_unknown_words_of_sharding_are_refused_and_not_left_out() -> None:
    for text, zero in (("3", 3), ("Z3", 3), ("os+g", 2), ("sharded optimizer", 1), ("TP8 PP4", 0),
                       ("ZeRO-3 (no offload)", 3), ("dp_shard 8 dp_replicate 8", 3)):  # fmt: skip
        assert said(sharding=text).seeds[0].zero == zero
    for text, reason in (("DiLoCo", "sharding in other words"),
                         ("ZeRO-Infinity NVMe", "states kept on the host")):  # fmt: skip
        with pytest.raises(Inexpressible) as refused:
            said(sharding=text)
        assert refused.value.reason == reason


def test_a_family_of_models_tells_its_gate_and_its_vocabulary() -> None:
    mistral = {"model": "Mistral 7B", "ffn_type": "", "vocab": None, "params_b": None}
    decoder = said(**mistral).decoder
    assert (decoder.gated, decoder.vocab) == (True, 32000)
    assert decoder.num_parameters / 1e9 == pytest.approx(7.24, rel=2e-3)
    assert said(model="Llama 3 8B", vocab=None).decoder.vocab == 128256
    assert not said(model="Llama-3-8B", ffn_type="gelu").decoder.gated


def test_frameworks_that_compile_are_compiled_unless_the_row_says_no() -> None:
    for framework, compiled, software in (
        ("MaxText", "", "compiled"),
        ("litgpt (torch.compile)", "", "compiled"),
        ("litgpt (torch.compile)", "no", "eager"),
        ("Megatron Bridge", "", "megatron-core"),
        ("MegaScale", "", "megatron"),
    ):
        assert said(framework=framework, compile=compiled).software == software
