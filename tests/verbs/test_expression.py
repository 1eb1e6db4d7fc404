"""What published runs say, in the planner's words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwright.files.runs import PublishedRun
from shardwright.planner.space import Seed
from shardwright.verbs.dimensions import Inexpressible
from shardwright.verbs.expression import express

# Llama-2-7B as its authors print it.
RUN = PublishedRun(
    row=2, id="a", source_id="s", model="Llama2-7B", arch="decoder", layers=32, hidden=4096,
    heads=32, kv_heads=32, ffn_hidden=11008, ffn_type="swiglu", vocab=32000, seq=4096, params_b=6.74,
    gpu="H100", gpu_mem_gb=80, gpus_per_node=8, gpus=64, intra_bw_gbs=450, inter_bw_gbps_node=3200,
    tp=2, pp=2, vpp=1, cp=1, ep=1, dp=16, sharding="distributed optimizer (ZeRO-1)",
    seq_parallel="yes", micro_batch=1, global_batch=128, precision="bf16", recompute="none",
    flash_attn="yes", framework="Megatron-LM", software_date="2024-05",
)  # fmt: skip
GPT3 = {"arch": "decoder", "ffn_type": "gelu", "ffn_hidden": 49152, "hidden": 12288, "heads": 96,
        "kv_heads": 96, "layers": 96, "vocab": 51200, "seq": 2048, "params_b": 175.0}  # fmt: skip

LONG = "9" * 5000


def said(**cells: Any) -> Any:
    return express(replace(RUN, **cells))


def test_a_row_is_planned_as_it_is_printed() -> None:
    found = said()
    assert found.seeds == (
        Seed(data=16, tensor=2, stages=2, zero=1, num_microbatches=8, sequence=True),
    )
    assert (found.global_batch, found.precision, found.software) == (
        128,
        "bfloat16",
        "megatron-core",
    )
    assert found.cluster.num_devices == 64
    assert found.assumed == ("parameters gathered beneath the next forward",)


@pytest.mark.parametrize(
    ("cells", "billions"),
    [
        ({}, 6.738),  # Llama 2, table 1
        (GPT3, 174.6),  # GPT-3, table 2.1
        ({"experts": 8, "experts_topk": 2, "kv_heads": 8, "ffn_hidden": 14336,
          "params_b": 46.7}, 46.70),  # Mixtral 8x7B
        ({"kv_heads": 8, "ffn_hidden": 14336, "vocab": 128256, "params_b": 8.03}, 8.030),
    ],
)  # fmt: skip
def test_parameters_come_to_what_is_known_of_a_model(cells: Any, billions: float) -> None:
    assert said(**cells, pp=1, dp=32).decoder.num_parameters / 1e9 == pytest.approx(
        billions, rel=2e-3
    )


def test_the_last_stage_has_a_tied_table_of_its_own() -> None:
    tied = {"arch": "decoder, tied embeddings", "params_b": None}
    assert said(**tied, pp=1, dp=32).decoder.tied
    assert not said(**tied).decoder.tied


def test_only_some_experts_meet_a_token() -> None:
    mixtral = said(experts=8, experts_topk=2, kv_heads=8, ffn_hidden=14336, params_b=46.7)
    assert mixtral.decoder.num_active / 1e9 == pytest.approx(12.88, rel=2e-3)


@pytest.mark.parametrize(
    ("sharding", "zero", "group"),
    [
        ("none", 0, 1), ("", 0, 1), ("DDP (no ZeRO)", 0, 1), ("DDP", 0, 1),
        ("distributed optimizer, overlapped", 1, 1), ("ZeRO-1", 1, 1), ("DeepSpeed ZeRO-2", 2, 1),
        ("FSDP SHARD_GRAD_OP", 2, 1), ("FSDP2", 3, 1), ("FSDP FULL_SHARD", 3, 1), ("zero3", 3, 1),
        ("ZeRO-1, optimizer-state group 8", 1, 8), ("HSDP", 3, 8), ("FSDP HYBRID_SHARD", 3, 8),
        ("ZeRO-1, optimizer-state group 16", 1, 1),
    ],
)  # fmt: skip
def test_sharding_is_a_stage_and_a_group(sharding: str, zero: int, group: int) -> None:
    seed = said(sharding=sharding, pp=1, gpus=32).seeds[0]
    assert (seed.zero, seed.group, seed.data) == (zero, group, 16 // group)


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"precision": "nvfp4"}, "products of other formats"),
        ({"sharding": "ZeRO-3 + CPU-offloaded AdamW"}, "states kept on the host"),
        ({"dp": 8}, "degrees and devices disagree"),
        ({"global_batch": 100}, "batch does not divide"),
        ({"global_batch": None, "micro_batch": None}, "batch not published"),
        ({"gpu": "Abacus"}, "hardware"),
        ({"arch": "encoder-decoder"}, "not a decoder"),
        ({"arch": "mamba hybrid"}, "not a decoder"),
        ({"gpu": "A100", "precision": "fp8"}, "fp8 products"),
        ({"arch": "decoder, MLA"}, "latent attention"),
        ({"ffn_type": "swiglu+moe"}, "dimensions not published"),
        ({"ffn_hidden": None}, "dimensions not published"),
        ({"kv_heads": 3}, "dimensions not published"),
        ({"experts": 4, "experts_topk": 8}, "dimensions not published"),
        ({"recompute": "partial"}, "recomputation in part"),
        ({"experts": 8, "experts_topk": 2, "ep": 16}, "experts do not divide"),
        ({"experts": 64, "experts_topk": 2, "ep": 64}, "experts in part of an axis"),
        ({"vpp": 17}, "stages beyond layers"),
        ({"notes": "head_dim 0"}, "dimensions not published"),
        ({"arch": "decoder, head size: 99999999999"}, "dimensions not published"),
        ({"task": "lora", "notes": "rank " + "9" * 5000}, "dimensions not published"),
    ],
)
def test_what_cannot_be_said_is_refused_with_its_reason(cells: Any, reason: str) -> None:
    with pytest.raises(Inexpressible) as refused:
        said(**cells)
    assert refused.value.reason == reason


def test_numbers_of_thousands_of_digits_in_words_are_no_more_than_large() -> None:
    for cells in (
        {"recompute": f"every {LONG}"}, {"recompute": f"{LONG} of {LONG}"}, {"recompute": f"{LONG} layers"},
        {"sharding": f"zero-3 group size {LONG}"},
    ):  # fmt: skip
        assert said(**cells).seeds


def test_experts_reach_over_the_other_axes_where_their_degree_does() -> None:
    mixture = {"experts": 32, "experts_topk": 2}
    for cells, within, over in (
        ({"ep": 8}, 8, ()),
        ({"ep": 32}, 16, ("tensor",)),
        ({"ep": 32, "cp": 2, "dp": 8}, 8, ("context", "tensor")),
        ({"ep": 32, "cp": 2, "tp": 1}, 16, ("context",)),
    ):
        (seed,) = said(**mixture, **cells).seeds
        assert (seed.expert, seed.experts_over) == (within, over)
        assert seed.expert_pieces == cells["ep"]


def test_virtual_stages_are_an_interleaved_pipeline() -> None:
    found = said(vpp=4).seeds[0]
    assert (found.stages, found.chunks, found.schedule) == (2, 4, "interleaved")
    alone = said(vpp=4, pp=1, gpus=32).seeds[0]  # without a pipeline there is nothing to interleave
    assert (alone.stages, alone.chunks, alone.schedule) == (1, 1, "1f1b")


def test_megatrons_pipelines_interleave_where_their_chunks_are_not_said() -> None:
    """The fewest equal chunks, of one layer each in NeMo's recipes, where microbatches are whole rounds;
    DeepSpeed's pipelines cannot."""
    for cells, chunks in (
        ({}, 2), ({"vpp": 1}, 1), ({"software_date": "2020-11"}, 1), ({"layers": 30}, 3),
        ({"layers": 31}, 1),
        ({"global_batch": 48}, 1), ({"framework": "Megatron-DeepSpeed"}, 1), ({"task": "lora"}, 2),
        ({"framework": "NeMo"}, 16),
        ({"framework": "torchtitan", "sharding": "FSDP2"}, 1),
    ):  # fmt: skip
        found = said(**{"vpp": None, "params_b": None, **cells})
        assert found.seeds[0].chunks == chunks, cells
        note = f"{chunks} chunks per stage" if chunks > 1 else "no interleaving"
        assert (note in found.assumed) == ("vpp" not in cells)


def test_fine_tuning_looks_within_the_samples_that_are_packed() -> None:
    whole = said(framework="NeMo", seq=4096)
    for task in ("SFT", "lora"):
        packed = said(framework="NeMo", seq=4096, task=task)
        assert packed.decoder.seq == 256
        assert packed.global_batch == 16 * whole.global_batch
        counts = {one.seeds[0].num_microbatches for one in (packed, whole)}
        assert len(counts) == 1
        assert "packed samples of 256 tokens" in packed.assumed
    others = (
        {"framework": "torchtitan"},
        {"task": "pretrain"},
        {"micro_batch": None},
        {"seq": 4000},
    )
    for cells in others:
        found = said(**{"framework": "NeMo", "seq": 4096, "task": "sft", **cells})
        assert found.decoder.seq == cells.get("seq", 4096)


def test_frameworks_differ_in_what_they_keep() -> None:
    assert said().gathers_again
    assert not said(seq_parallel="no").gathers_again
    assert not said(framework="torchtitan").gathers_again
    assert said(framework="nanotron").gathers_again
    assert said().training.accumulation == "float32"
    assert said(framework="NeMo").training.accumulation == "own"
    assert said(framework="HF + DeepSpeed").training.accumulation == "own"


def test_a_microbatch_that_was_not_published_leaves_several() -> None:
    found = said(micro_batch=None)
    assert [seed.num_microbatches for seed in found.seeds] == [8, 4, 2, 1]
    assert "microbatch" in found.assumed


def test_a_microbatch_follows_from_accumulation() -> None:
    assert said(micro_batch=None, grad_accum=4).seeds[0].num_microbatches == 4


def test_almost_everything_may_be_blank() -> None:
    bare = PublishedRun(
        row=2, id="a", source_id="s", model="Llama", layers=2, hidden=256, heads=4, ffn_hidden=512,
        seq=128, gpu="A100", gpus=8, global_batch=16, micro_batch=1,
    )  # fmt: skip
    found = express(bare)
    assert found.seeds == (Seed(data=8, num_microbatches=2),)
    assert {"vocab 32000", "bfloat16", "no recomputation"} <= set(found.assumed)


def test_float16_multiplies_at_float16s_rate() -> None:
    found = said(gpu="V100-32", gpu_mem_gb=32, precision="fp16")
    assert found.cluster.kinds[0].flops_for(found.precision) == 125e12  # the data sheet's


def test_recomputation_has_the_planners_names() -> None:
    names = {"full": "blocks", "none": "none", "": "none", "full (uniform, 1)": "blocks"}
    for text, name in names.items():
        assert said(recompute=text).training.recompute == name
    assert said(recompute="selective").training.recompute == "none"  # nothing is kept to drop
    assert said(recompute="selective", flash_attn="no").training.recompute == "attention"
    assert said(recompute="selective", framework="torchtitan").training.recompute == "selective"


def test_recomputation_of_some_layers_is_a_share_of_each_stages() -> None:
    for text, share in (
        ("block, 4 layers", 0.25), ("8 of 32 layers", 0.25), ("every 2nd layer", 0.5), ("full", 1),
        ("40 layers", 1), ("full (uniform, 1)", 1), ("per-layer", 1),
    ):  # fmt: skip
        found = said(recompute=text)  # 32 layers on two stages
        assert (found.training.recompute, found.recomputed_share) == ("blocks", share), text


def test_words_are_read_as_they_are_meant() -> None:
    for text in ("no", "False", "off", "none"):
        assert said(recompute=text).training.recompute == "none"
        assert not said(seq_parallel=text).seeds[0].sequence
        assert said(framework="x", software_date="2025", compile=text).software == "eager"
    for text in ("yes", "True", "gradient checkpointing", "activation checkpointing"):
        assert said(recompute=text).training.recompute == "blocks"
    assert said(seq_parallel="True").seeds[0].sequence
    assert said(framework="x", compile="torch.compile (inductor)").software == "compiled"
    for text, zero in (
        ("zero_3", 3), ("ZeRO stage 1", 1), ("stage 2", 2), ("NO_SHARD", 0), ("dist-opt", 1),
        ("use_distributed_optimizer", 1), ("optimizer states sharded", 1), ("unsharded", 0),
        ("FSDP, reshard_after_forward=False", 2), ("ZeRO++", 3), ("Megatron-FSDP", 3),
    ):  # fmt: skip
        assert said(sharding=text, pp=1, gpus=32).seeds[0].zero == zero, text
    shards = said(sharding="HSDP (shard 4, replicate 4)", pp=1, gpus=32).seeds[0]
    assert (shards.zero, shards.group, shards.data) == (3, 4, 4)
    assert said(gpu="V100-32", gpu_mem_gb=32, precision="mixed").precision == "float16"


def test_software_is_what_the_framework_runs_on() -> None:
    for framework, date, compiled, profile in (
        ("Megatron-LM", "2021-04", "", "megatron"), ("Megatron-LM", "2024-05", "", "megatron-core"),
        ("NeMo/Megatron-Core", "2023-11", "", "megatron-core"), ("InternEvo", "2024", "", "internevo"),
        ("Megatron-Core, no gradient-accumulation fusion", "2026", "", "megatron"),
        ("torchtitan", "2024-12", "yes", "compiled"), ("torchtitan", "2024-12", "no", "eager"),
        ("torchtitan + async TP", "2024-12", "yes", "compiled-async"),
        ("llm-foundry", "2023-06", "no", "eager-2023"),
    ):  # fmt: skip
        assert said(framework=framework, software_date=date, compile=compiled).software == profile


def test_what_megatron_sends_beneath_what_it_computes() -> None:
    """Gradients since 2023; parameters where the source says so, or by Megatron-Core's habit."""
    early = said(software_date="2021-04")
    assert not early.overlaps_gradients
    assert not early.runs_ahead
    assert said(software_date="").overlaps_gradients
    overlapped = said(sharding="distributed optimizer, overlapped", software_date="2023-05")
    assert overlapped.overlaps_gradients
    assert overlapped.runs_ahead
    assert not any("gathered" in one for one in overlapped.assumed)
    assert not said(sharding="DDP").runs_ahead
    assert not said(framework="DeepSpeed", sharding="ZeRO-2, overlap_comm").runs_ahead
    assert said(framework="x", sharding="ZeRO-1, overlapped param gather").runs_ahead


@pytest.mark.parametrize(
    ("cells", "dropout", "loss"),
    [
        ({}, 0.0, "in place"),
        ({"software_date": "2022-06"}, 0.0, "copied"),
        ({**GPT3, "software_date": "2021-04"}, 0.1, "copied"),
        ({**GPT3, "ffn_type": "squared-relu"}, 0.0, "in place"),
        ({"framework": "HF Trainer + DeepSpeed"}, 0.0, "log_softmax"),
        ({"framework": "Composer+FSDP"}, 0.0, "in place"),
        ({"framework": "nanotron"}, 0.0, "copied"),
        (
            {"framework": "torchtitan", "compile": "yes", "software_date": "2024-12"},
            0.0,
            "log_softmax",
        ),
        (
            {"framework": "torchtitan", "compile": "yes", "software_date": "2025-06"},
            0.0,
            "compiled",
        ),
        (
            {"framework": "torchtitan", "compile": "no", "software_date": "2025-06"},
            0.0,
            "log_softmax",
        ),
    ],
)
def test_software_says_what_is_dropped_and_how_the_loss_is_made(
    cells: Any, dropout: float, loss: str
) -> None:
    decoder = said(**cells).decoder
    assert (decoder.dropout, decoder.loss) == (dropout, loss)


def test_pytorchs_pipelines_gather_parameters_once_a_step() -> None:
    """torchtitan: ``reshard_after_forward=not pp_enabled``; gradients stay whole until the last."""
    assert said(sharding="FSDP2", framework="torchtitan").seeds[0].zero == 1
    assert said(sharding="FSDP2", framework="torchtitan", pp=1, dp=32).seeds[0].zero == 3


def test_torchtitans_pipelines_have_its_microbatches_and_chunks() -> None:
    """As many microbatches as stages of devices, of one sample since 2025-04; two chunks where interleaved."""
    titan = {"framework": "torchtitan", "micro_batch": None, "vpp": None}
    for date, notes, pipeline in (
        ("2024-12", "1F1B", (2, 1)), ("2024-12", "interleaved 1F1B", (2, 2)), ("2025-06", "", (8, 1)),
    ):  # fmt: skip
        found = said(**titan, software_date=date, notes=notes)
        assert [(one.num_microbatches, one.chunks) for one in found.seeds] == [pipeline]


def test_products_are_apart_where_model_code_has_them_so() -> None:
    assert said(framework="torchtitan").decoder.apart
    assert said(framework="HF Trainer + DeepSpeed").decoder.apart
    assert not said().decoder.apart


def test_kernels_are_those_of_the_time_and_the_framework() -> None:
    experts = {"experts": 8, "experts_topk": 2, "model": "OLMoE", "pp": 1, "gpus": 32}
    for framework, date, kernels in (
        ("torchtitan", "2024-12", (True, "triton", True)),
        ("torchtitan", "2026-01", (False, "cutlass", True)),
        ("Megatron-LM", "2024-12", (False, "cutlass", False)),
        ("HF + Liger", "2024-12", (False, "triton", False)),
        ("nanotron", "2024-12", (False, "triton", False)),
    ):
        decoder = said(framework=framework, software_date=date, **experts).decoder
        assert (decoder.stepwise, decoder.grouped, decoder.sorts) == kernels
        assert decoder.qk_norm
    assert not said().decoder.qk_norm


def test_where_the_microbatch_is_not_known_those_interleave_that_can() -> None:
    found = said(vpp=None, micro_batch=None, pp=4, dp=8, global_batch=64)
    # 8, 4, 2 and 1 microbatches, of which whole rounds of four interleave.
    assert [seed.chunks for seed in found.seeds] == [2, 2, 1, 1]
    assert {"2 chunks per stage", "no interleaving"} <= set(found.assumed)
    # Seven layers of a stage are one, or seven chunks.
    assert said(vpp=None, layers=28, pp=4, dp=8, global_batch=64).seeds[0].chunks == 7
