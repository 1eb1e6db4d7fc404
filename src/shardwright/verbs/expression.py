"""What a published run says, as the planner says it: model, cluster, strategy, training.

A row is planned as it is printed. What was not published and has a usual value is assumed, and the
case lists it; what cannot be said is refused with a reason, and counted.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import get_args

from shardwright.core.cluster import Cluster
from shardwright.core.decoder import Decoder
from shardwright.core.strategy import Precision
from shardwright.errors import InputError
from shardwright.files.rungpus import cluster_of_run
from shardwright.files.runs import PublishedRun
from shardwright.planner.search import Training
from shardwright.planner.space import Seed

# Parameters that differ from the printed ones by more would be another model.
SAME_SIZE = 0.1
# Since when training decoders without a fused attention is unusual.
FLASH_SINCE = "2023"
USUAL_VOCAB = 50304
# Since when eager PyTorch has the kernels of today (2.2 and later); older and undated is older.
EAGER_SINCE = "2024"
# What is built on Megatron-Core and Transformer Engine; Megatron-LM itself is since its models are.
CORE, CORE_SINCE = ("megatron-core", "megatron core", "mcore", "nemo"), "2024"
# Since when Megatron-LM sends gradients beneath backward.
MODERN_SINCE = "2023"
UNFUSED = "no gradient-accumulation fusion"
USUAL_RANK = 32
USUAL_DROPOUT = 0.1
# Frameworks besides Megatron-LM and its kin whose cross entropy works in place.
IN_PLACE_SINCE = "2024"  # Megatron-LM's (core 0.5)
FUSED_LOSSES = ("composer", "foundry", "liger")
# What a run whose microbatch was not published may have used: the fastest of these that fits.
MICROBATCHES = (1, 2, 4, 8, 16)


class Inexpressible(Exception):
    """A run that cannot be planned as it is printed: ``reason`` for counting, ``detail`` for reading."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True, kw_only=True)
class Expression:
    """A run as the planner says it.

    ``seeds`` is the one strategy, or several where the microbatch was not published: the fastest that
    fits is meant. ``software`` names how its kernels were made. ``runs_ahead``: parameters come back
    to rest beneath the next step's forward.
    """

    decoder: Decoder
    cluster: Cluster
    seeds: tuple[Seed, ...]
    training: Training
    global_batch: int
    precision: str
    software: str
    assumed: tuple[str, ...]
    runs_ahead: bool = False
    overlaps_gradients: bool = True


def express(run: PublishedRun) -> Expression:
    """Return a run as the planner says it. Raises Inexpressible."""
    assumed: list[str] = []
    precision = _precision(run, assumed)
    decoder = decoder_of(run, assumed)
    seeds, batch = _seeds(run, assumed)
    try:
        cluster, guesses = cluster_of_run(run)
    except InputError as error:
        raise Inexpressible("hardware", str(error)) from error
    cluster = replace(cluster, software=profile_of(run))
    recompute = _recomputation(run, decoder, assumed)
    runs_ahead = _runs_ahead(run, cluster.software, seeds[0], assumed)
    return Expression(
        decoder=decoder,
        cluster=cluster,
        seeds=seeds,
        training=Training(precision=precision, clips=True, recompute=recompute),  # type: ignore[arg-type]  # names of Training's
        global_batch=batch,
        precision=precision,
        software=cluster.software,
        assumed=(*assumed, *guesses),
        runs_ahead=runs_ahead,
        overlaps_gradients=not _is_early_megatron(run),
    )


def _is_early_megatron(run: PublishedRun) -> bool:
    """Whether a run is of Megatron-LM before ``--overlap-grad-reduce`` and FlashAttention."""
    name = run.framework.lower()
    return "megatron" in name and "" < run.software_date < MODERN_SINCE


def _runs_ahead(run: PublishedRun, software: str, seed: Seed, assumed: list[str]) -> bool:
    """Whether parameters that ZeRO-1 or 2 gathers after the update arrive beneath the next forward.

    Megatron-Core and NeMo can do that; their published configurations do.
    """
    if seed.zero not in (1, 2):
        return False
    text = run.sharding.lower()
    if "overlap" in text and ("param" in text or software_of(run) == "megatron"):
        return True
    if software == "megatron-core":
        assumed.append("parameters gathered beneath the next forward")
        return True
    return False


def software_of(run: PublishedRun) -> str:
    """Name how a run's kernels were made: ``megatron`` (fused by hand), ``compiled`` or ``eager``."""
    name = run.framework.lower()
    if any(word in name for word in ("megatron", "nemo", "internevo", "mcore")):
        return "megatron"
    return "compiled" if run.compile.lower().startswith("yes") else "eager"


def profile_of(run: PublishedRun) -> str:
    """Return the cluster's software profile (``core.cluster.SOFTWARE``) of a run."""
    made, name = software_of(run), run.framework.lower()
    if made == "megatron":
        is_core = any(word in name for word in CORE) or (
            "megatron-lm" in name and run.software_date >= CORE_SINCE
        )
        return "megatron-core" if is_core and UNFUSED not in name else made
    if made == "compiled":
        return "compiled-async" if "async" in name else made
    return "eager-2023" if run.software_date < EAGER_SINCE else made


def decoder_of(run: PublishedRun, assumed: list[str]) -> Decoder:
    """Return the dimensions of a run's model; what is assumed is added to the list."""
    arch, ffn = run.arch.lower(), run.ffn_type.lower()
    if "encoder" in arch or "vit" in arch.split():
        raise Inexpressible("not a decoder", run.arch)
    if "mla" in arch or "latent" in arch:
        raise Inexpressible("latent attention", "the columns do not tell its ranks")
    gated = any(word in ffn for word in ("swiglu", "silu", "geglu", "gated", "reglu"))
    gated = gated or (not ffn and "llama" in run.model.lower())
    width = run.ffn_hidden
    if width is None:
        if gated:
            raise Inexpressible("dimensions not published", "no ffn_hidden")
        width = 4 * run.hidden
        assumed.append(f"ffn_hidden {width}")
    vocab = run.vocab
    if vocab is None:
        vocab = USUAL_VOCAB
        assumed.append(f"vocab {vocab}")
    tensor = run.tp or 1
    if vocab % (tensor * 8):
        vocab += -vocab % (128 * tensor)
        assumed.append(f"vocab padded to {vocab}")
    experts, topk = _experts(run)
    activation = "relu2" if "square" in ffn else "silu" if gated and "ge" not in ffn else "gelu"
    turns = gated or any(word in arch for word in ("rope", "rotary")) or activation == "relu2"
    shape = Decoder(
        layers=run.layers,
        hidden=run.hidden,
        heads=run.heads,
        kv_heads=run.kv_heads or run.heads,
        head_size=_head_size(run),
        ffn=width,
        vocab=vocab,
        seq=run.seq,
        activation=activation,
        gated=gated,
        rms=gated,
        bias=not gated and "alibi" not in arch,
        rotary=turns and "alibi" not in arch and "learned" not in arch,
        positions="learned" in arch or not (turns or "alibi" in arch),
        flash=_is_flash(run, assumed),
        fused=software_of(run) != "eager" or "liger" in run.framework.lower(),
        experts=experts,
        topk=topk,
        adapters=_rank(run, assumed),
        dropout=_dropout(run, gated, assumed),
        loss=_loss(run),
    )
    shape = replace(shape, shared=_shared(run, shape, assumed))
    shape = replace(shape, tied=_is_tied(run, shape))
    size = shape.num_parameters / 1e9
    if run.params_b is not None and abs(size / run.params_b - 1) > SAME_SIZE:
        assumed.append(f"{size:.3g} G parameters, {run.params_b:.3g} G printed")
    return shape


def _experts(run: PublishedRun) -> tuple[int, int]:
    """Return the number of experts and how many each token goes to; 0 for a dense model."""
    if (run.experts or 1) == 1:
        if "moe" in f"{run.ffn_type} {run.arch}".lower():
            raise Inexpressible("dimensions not published", "no number of experts")
        return 0, 0
    if run.experts_topk is None:
        raise Inexpressible("dimensions not published", "no experts_topk")
    experts, topk = run.experts or 1, run.experts_topk
    if run.seq * topk % experts:
        raise Inexpressible(
            "tokens do not divide", f"{run.seq} tokens to {topk} of {experts} experts"
        )
    return experts, topk


def _shared(run: PublishedRun, shape: Decoder, assumed: list[str]) -> int:
    """Return the width of the expert that all tokens go to, as active parameters tell."""
    text = f"{run.arch} {run.ffn_type} {run.notes}".lower()
    if not shape.experts or "shared" not in text:
        return 0
    written = re.search(r"shared experts? (?:of )?(\d{3,})", text)
    if written:
        return int(written[1])
    if run.active_params_b is None:
        width = shape.ffn
    else:
        left = run.active_params_b * 1e9 - replace(shape, tied=False).num_active
        width = round(left / (shape.layers * 3 * shape.hidden) / 128) * 128
    assumed.append(f"shared expert {max(width, 0)}")
    return max(width, 0)


def _rank(run: PublishedRun, assumed: list[str]) -> int:
    """Return the rank of what is trained beside frozen weights, 0 where all is trained."""
    if "lora" not in run.task.lower():
        return 0
    written = re.search(r"(?:rank|dim) ?=? ?(\d+)", run.notes.lower())
    if written:
        return int(written[1])
    assumed.append(f"adapters of rank {USUAL_RANK} in attention")
    return USUAL_RANK


def _head_size(run: PublishedRun) -> int:
    written = re.search(r"head[_ ](?:dim|size)[ =:]*(\d+)", f"{run.arch} {run.notes}".lower())
    if written:
        return int(written[1])
    if run.hidden % run.heads:
        raise Inexpressible("dimensions not published", f"{run.heads} heads of {run.hidden}")
    return run.hidden // run.heads


def _is_tied(run: PublishedRun, shape: Decoder) -> bool:
    """Whether the head is the embedding: as printed, or as the number of parameters tells."""
    arch = run.arch.lower()
    if "tied" in arch:
        return "untied" not in arch
    tied, untied = (replace(shape, tied=one).num_parameters / 1e9 for one in (True, False))
    if run.params_b is not None and untied - tied > 0.02 * run.params_b:
        return abs(tied - run.params_b) < abs(untied - run.params_b)
    return not shape.gated


def _is_flash(run: PublishedRun, assumed: list[str]) -> bool:
    text = run.flash_attn.lower()
    if text:
        return not text.startswith(("no", "eager"))
    flash = run.software_date >= FLASH_SINCE
    assumed.append("fused attention" if flash else "no fused attention")
    return flash


def _dropout(run: PublishedRun, gated: bool, assumed: list[str]) -> float:
    """Return the share dropped: Megatron-LM's default is 0.1, which recipes of later models (gates,
    squared relu) turn off (``--attention-dropout``, ``--hidden-dropout``); elsewhere none is usual."""
    is_later = gated or "relu" in run.ffn_type.lower() or "lora" in run.task.lower()
    if is_later or "megatron" not in run.framework.lower():
        return 0.0
    assumed.append(f"dropout {USUAL_DROPOUT}")
    return USUAL_DROPOUT


def _loss(run: PublishedRun) -> str:
    """Name the kernel of cross entropy (``planner.cost.derivatives``)."""
    name = run.framework.lower()
    if software_of(run) == "megatron":
        is_older = "" < run.software_date < IN_PLACE_SINCE and "megatron" in name
        return "copied" if is_older else "in place"
    return "in place" if any(one in name for one in FUSED_LOSSES) else "log_softmax"


def _precision(run: PublishedRun, assumed: list[str]) -> str:
    """Return the planner's name of a precision."""
    text = run.precision.lower()
    if any(word in text for word in ("fp4", "int8", "int4")):
        raise Inexpressible("products of other formats", run.precision)
    if "fp8" in text or "float8" in text:
        wanted = "fp8-row" if "row" in text or "mx" in text else "fp8"
        if wanted not in get_args(Precision):
            raise Inexpressible("fp8 products", run.precision)
        return wanted
    if not text:
        assumed.append("bfloat16")
    if "16" not in text and any(word in text for word in ("fp32", "float32", "tf32")):
        return "float32"
    return "float16" if "16" in text and "bf" not in text else "bfloat16"


def _recomputation(run: PublishedRun, decoder: Decoder, assumed: list[str]) -> str:
    text = run.recompute.lower()
    if not text:
        assumed.append("no recomputation")
    if text in ("", "none", "no"):
        return "none"
    if "offload" in text:
        raise Inexpressible("activations kept on the host", run.recompute)
    is_part = re.search(r"\d", text) and "uniform" not in text
    if text.startswith(("full", "yes", "block", "uniform")) and not is_part:
        return "blocks"
    if text.startswith(("sel", "attention", "core")):
        if "titan" in run.framework.lower():
            return "selective"
        return "none" if decoder.flash else "attention"
    raise Inexpressible("recomputation in part", run.recompute)


def _seeds(run: PublishedRun, assumed: list[str]) -> tuple[tuple[Seed, ...], int]:
    """Return the degrees of a run, once for every microbatch that is possible, and its batch."""
    tensor, stages, context, expert = run.tp or 1, run.pp or 1, run.cp or 1, run.ep or 1
    data, left = divmod(run.gpus, tensor * stages * context)
    if left or not data or (run.dp or data) != data:
        raise Inexpressible(
            "degrees and devices disagree",
            f"tp {tensor} x pp {stages} x cp {context} x dp {run.dp or data} on {run.gpus}",
        )
    chunks = (run.vpp or 1) if stages > 1 else 1
    if stages > 1 and run.vpp is None:
        assumed.append("no interleaving")
    if data % expert or (run.experts or expert) % expert:
        raise Inexpressible("experts beyond data", f"ep {expert}, dp {data}, {run.experts} experts")
    zero, group = _sharding(run, data)
    if zero == 3 and stages > 1 and "fsdp" in run.sharding.lower():
        # PyTorch's pipelines gather a stage's parameters once a step, not once a microbatch, and add
        # gradients up whole until the last (torchtitan: ``reshard_after_forward=not pp_enabled``).
        zero = 1
    if expert > 1 and group > 1:
        raise Inexpressible("experts beyond data", f"ep {expert} with ZeRO groups of {group}")
    counts, batch = _batches(run, data)
    if len(counts) > 1:
        assumed.append("microbatch")
    return tuple(
        Seed(
            data=data // group // expert,
            group=group,
            tensor=tensor,
            stages=stages,
            chunks=chunks,
            schedule="interleaved" if chunks > 1 else "1f1b",
            context=context,
            expert=expert,
            zero=zero,
            num_microbatches=count,
            sequence=tensor > 1 and _is_sequence(run, assumed),
        )
        for count in counts
    ), batch


def _is_sequence(run: PublishedRun, assumed: list[str]) -> bool:
    """Whether activations between the tensor-parallel regions are split too."""
    if run.seq_parallel:
        return run.seq_parallel.lower().startswith("y")
    name = run.framework.lower()
    usual = "titan" in name or (software_of(run) == "megatron" and run.software_date >= "2023")
    note = "sequence parallel" if usual else "no sequence parallel"
    if note not in assumed:
        assumed.append(note)
    return usual


def _batches(run: PublishedRun, data: int) -> tuple[tuple[int, ...], int]:
    """Return the numbers of microbatches that are possible, and samples per step."""
    micro, count, batch = run.micro_batch, run.grad_accum, run.global_batch
    if batch is None and micro and count:
        batch = micro * count * data
    if batch is None:
        raise Inexpressible("batch not published", "no global_batch")
    if micro is None and count is not None and batch % (count * data) == 0:
        micro = batch // (count * data)
    sizes = MICROBATCHES if micro is None else (micro,)
    counts = tuple(batch // (size * data) for size in sizes if batch % (size * data) == 0)
    if not counts:
        raise Inexpressible("batch does not divide", f"{batch} by {sizes[0]} x dp {data}")
    return counts, batch


def _sharding(run: PublishedRun, data: int) -> tuple[int, int]:
    """Return the ZeRO stage and the size of its groups (1: all data-parallel devices)."""
    text = run.sharding.lower()
    if "offload" in text:
        raise Inexpressible("states kept on the host", run.sharding)
    stage = re.search(r"zero[- ]?([0-3])", text)
    grouped = re.search(r"group(?: of| size)? (\d+)", text)
    group = int(grouped[1]) if grouped else 0
    if stage and "no zero" not in text:
        zero = int(stage[1])
    elif any(word in text for word in ("shard_grad", "grad_op")):
        zero = 2
    elif any(word in text for word in ("fsdp", "full_shard", "fully shard", "hybrid", "hsdp")):
        zero = 3
    else:
        zero = 1 if "distributed optimizer" in text else 0
    if not group and ("hybrid" in text or "hsdp" in text):
        group = run.gpus_per_node or 8
    if not zero or group in (0, 1) or group >= data:
        return (0 if group == 1 else zero), 1
    if data % group:
        raise Inexpressible("batch does not divide", f"dp {data} in groups of {group}")
    return zero, group
