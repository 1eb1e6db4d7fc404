"""What a published run says, as the planner says it: model, cluster, strategy, training.

A row is planned as it is printed. What was not published and has a usual value is assumed, and the
case lists it; what cannot be said is refused with a reason, and counted.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from shardwright.core.cluster import Cluster
from shardwright.core.decoder import Decoder
from shardwright.core.strategy import Recomputation
from shardwright.errors import InputError
from shardwright.files.rungpus import cluster_of_run
from shardwright.files.runs import PublishedRun
from shardwright.planner.search import Training
from shardwright.planner.space import Seed
from shardwright.planner.space.seeds import BesideData
from shardwright.verbs.completed import MOST_TOKENS, completed
from shardwright.verbs.dimensions import (
    Inexpressible,
    decoder_of,
    is_no,
    is_titan,
    is_yes,
    mentions,
    names,
    software_of,
)
from shardwright.verbs.habits import chunks_of, usual_microbatches

# Since when eager PyTorch has the kernels of today (2.2 and later); older and undated is older.
EAGER_SINCE = "2024"
# What is built on Megatron-Core and Transformer Engine; Megatron-LM itself is since its models are.
CORE, CORE_SINCE = ("megatron-core", "megatron core", "mcore", "nemo", "bridge"), "2024"
# Since when Megatron-LM sends gradients beneath backward.
MODERN_SINCE = "2023"
UNFUSED = "no gradient-accumulation fusion"
# Frameworks whose gradients of microbatches add up in the parameters' 16 bits unless asked otherwise.
NARROW_SUMS = ("deepspeed", "nemo")
# Fine-tuning, and whose is measured on what length of samples, packed to the sequence length: passages and questions
# of some 200 tokens (SQuAD, as NVIDIA's pages of NeMo's performance say).
FINE_TUNING, PACKING, PACKED_TOKENS = ("sft", "lora", "fine"), ("nemo",), 256
# Words of precision and the planner's name, first come first served; "": what devices of the time had.
PRECISIONS = (
    (r"(?s)^(?=.*(?:fp8|float8)).*(?:row|mx|block)", "fp8-row"),
    (r"fp8|float8", "fp8"),
    (r"^\D*half\D*$", "float16"),
    (r"^\D*$", ""),
    (r"(?s)bf.*16|16.*bf", "bfloat16"),
    (r"16", "float16"),
    (r"32", "float32"),
    (r"", "bfloat16"),
)
# Words of sharding and the ZeRO stage that they mean, first come first served.
SHARDINGS = (
    (("no shard", "unsharded", "not sharded", "no fsdp"), 0),
    (("shard grad", "grad op", "reshard after forward=false", "os+g"), 2),
    (("fsdp", "full shard", "fully shard", "hybrid", "hsdp", "zero++", "mics", "dp shard"), 3),
    (
        (
            "distributed optimizer",
            "dist opt",
            "distopt",
            "optimizer state",
            "sharded optim",
            "p os",
        ),
        1,
    ),
    (
        (
            "dp",
            "data parallel",
            "replicat",
            "no zero",
            "none",
            "tensor",
            "pipeline",
            "3d",
            "tp",
            "pp",
        ),
        0,
    ),
)
ON_HOST = ("offload", "infinity", "nvme", "cpu")
# Words for recomputing layers whole, for parts of them, and devices without bfloat16.
WHOLE = ("full", "block", "uniform", "checkpoint", "layer", "all")
PARTS = re.compile(r"norm|\bact\b|moe|mlp|mla|proj|loss|budget")
BEFORE_BFLOAT16 = ("V100", "T4", "P40", "1080")
# Over which axes experts may lie besides data: the fewest that make up their degree.
BESIDE_DATA: tuple[BesideData, ...] = ((), ("context",), ("tensor",), ("context", "tensor"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Expression:
    """A run as the planner says it.

    ``seeds`` is the one strategy, or several where the microbatch was not published: the fastest that
    fits is meant. ``software`` names how its kernels were made. ``runs_ahead``: parameters come back
    to rest beneath the next step's forward. ``is_even``: stages have equally many layers, as most
    frameworks cut them (DeepSpeed's have about equally many parameters). ``gathers_again``: what
    sequence parallelism gathers for a product is not kept, but gathered again in backward
    (Megatron-LM, nanotron). ``recomputed_share``: of each stage's layers, the first.
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
    recomputed_share: float = 1.0
    is_even: bool = True
    gathers_again: bool = False


def express(run: PublishedRun) -> Expression:
    """Return a run as the planner says it. Raises Inexpressible."""
    assumed: list[str] = []
    run = _unpacked(completed(run, assumed), assumed)
    precision = _precision(run, assumed)
    decoder = decoder_of(run, assumed)
    if (run.pp or 1) > 1:
        # The last stage has a copy of a tied table, with gradients and states of its own.
        decoder = replace(decoder, tied=False)
    seeds, batch = _seeds(run, assumed)
    try:
        cluster, guesses = cluster_of_run(run)
    except InputError as error:
        raise Inexpressible("hardware", str(error)) from error
    cluster = replace(cluster, software=profile_of(run))
    recompute, share = _recomputation(run, decoder, assumed)
    if "fp8" in precision and "float8" not in dict(cluster.kinds[0].peak_flops):
        raise Inexpressible("fp8 products", f"{run.gpu} has none")
    runs_ahead = _runs_ahead(run, cluster.software, seeds[0], assumed)
    return Expression(
        decoder=decoder,
        cluster=cluster,
        seeds=seeds,
        training=Training(
            precision=precision,  # type: ignore[arg-type]  # names of Training's
            clips=True,
            recompute=recompute,
            accumulation="own" if names(run, NARROW_SUMS) else "float32",
        ),
        global_batch=batch,
        precision=precision,
        software=cluster.software,
        assumed=(*assumed, *guesses),
        runs_ahead=runs_ahead,
        overlaps_gradients=not _is_early_megatron(run),
        recomputed_share=share,
        is_even=not names(run, ("deepspeed",)),
        gathers_again=seeds[0].sequence and _gathers_again(run),
    )


def _gathers_again(run: PublishedRun) -> bool:
    return software_of(run) == "megatron" or names(run, ("nanotron",))


def _unpacked(run: PublishedRun, assumed: list[str]) -> PublishedRun:
    """Return a run on packed samples as one on these samples: attention looks no further."""
    count, left = divmod(run.seq, PACKED_TOKENS)
    packs = mentions(run.task.lower(), FINE_TUNING) and names(run, PACKING)
    if (
        not packs
        or left
        or (run.cp or 1) > 1
        or run.global_batch is None
        or run.micro_batch is None
    ):
        return run
    assumed.append(f"packed samples of {PACKED_TOKENS} tokens")
    return replace(
        run,
        seq=PACKED_TOKENS,
        global_batch=run.global_batch * count,
        micro_batch=run.micro_batch * count,
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


def profile_of(run: PublishedRun) -> str:
    """Return the cluster's software profile (``core.cluster.SOFTWARE``) of a run."""
    made, name = software_of(run), run.framework.lower()
    if "internevo" in name:
        return "internevo"
    if made == "megatron":
        return "megatron-core" if _is_core(run) else made
    if made == "compiled":
        return "compiled-async" if "async" in name else made
    return "eager-2023" if run.software_date < EAGER_SINCE else made


def _is_core(run: PublishedRun) -> bool:
    """Whether a run is of Megatron-Core with its kernels, or of what is built on it."""
    is_later = names(run, ("megatron-lm",)) and run.software_date >= CORE_SINCE
    return (is_later or names(run, CORE)) and not names(run, (UNFUSED,))


def _precision(run: PublishedRun, assumed: list[str]) -> str:
    """Return the planner's name of a precision."""
    text = run.precision.lower()
    if re.search("fp4|int8|int4|tf32", text):
        raise Inexpressible("products of other formats", run.precision)
    if not text:
        assumed.append("bfloat16")
    usual = "float16" if _lacks_bfloat16(run) else "bfloat16"
    return next(name for pattern, name in PRECISIONS if re.search(pattern, text)) or usual


def _lacks_bfloat16(run: PublishedRun) -> bool:
    return any(name in run.gpu.upper() for name in BEFORE_BFLOAT16)


def _share(text: str, per_stage: int) -> float | None:
    """Return the share of the layers that are recomputed whole, as words say it; None where they do
    not."""
    if PARTS.search(text):
        return None
    if is_yes(text) or re.search(r"uniform|(?:every|each|per|all) ?(?:1 )?layers?$", text):
        return 1.0
    if not re.search(r"\d|partial|every|half", text):
        return 1.0 if mentions(text, WHOLE) else None
    if re.search(r"\bhalf\b|every (?:second|other)", text):
        return 0.5
    if part := re.search(r"(\d{1,9}) ?(?:of|/) ?(\d{1,9})", text):
        return min(int(part[1]) / max(int(part[2]), 1), 1.0)
    if percent := re.search(r"(\d{1,9}) ?%", text):
        return min(int(percent[1]) / 100, 1.0)
    if every := re.search(r"every (\d{1,9})", text):
        return 1 / max(int(every[1]), 1)
    return _counted(text, per_stage)


def _counted(text: str, per_stage: int) -> float | None:
    count = re.search(
        r"(\d{1,9}) ?(?:transformer )?(?:layers?|blocks?)|layers?[ =:]+(\d{1,9})", text
    )
    return min(int(count[1] or count[2]) / per_stage, 1.0) if count else None


def _recomputation(
    run: PublishedRun, decoder: Decoder, assumed: list[str]
) -> tuple[Recomputation, float]:
    """Return what is recomputed, and in which share of the layers."""
    text = re.sub(r"\bac[ =:]+", "", run.recompute.lower())
    if not text:
        assumed.append("no recomputation")
    if is_no(text):
        return "none", 1.0
    if "offload" in text:
        raise Inexpressible("activations kept on the host", run.recompute)
    is_selected = text.startswith(("sel", "attention", "attn", "core", "op", "sac"))
    if is_selected and "layer" not in text and not PARTS.search(text):
        return _selected(run, decoder), 1.0
    share = _share(text, max(run.layers // (run.pp or 1), 1))
    if share is None:
        raise Inexpressible("recomputation in part", run.recompute)
    return "blocks", share


def _selected(run: PublishedRun, decoder: Decoder) -> Recomputation:
    """Return what frameworks mean by selective recomputation."""
    if is_titan(run):
        return "selective"
    return "none" if decoder.flash else "attention"


def _seeds(run: PublishedRun, assumed: list[str]) -> tuple[tuple[Seed, ...], int]:
    """Return the degrees of a run, once for every microbatch that is possible, and its batch."""
    data, tensor, stages, context, expert = _degrees(run)
    zero, group = _sharding(run, data)
    if expert > 1 and group > 1:
        raise Inexpressible("experts beyond data", f"ep {expert} with ZeRO groups of {group}")
    within, over = _experts_over(run, data, tensor, context)
    counts, batch = _batches(run, data)
    if len(counts) > 1:
        assumed.append("microbatch")
    chunks = {count: chunks_of(run, count, assumed) for count in counts}
    if stages * max(chunks.values()) > run.layers:
        raise Inexpressible(
            "stages beyond layers", f"pp {stages} x vpp {max(chunks.values())}, {run.layers} layers"
        )
    sequence = tensor > 1 and _is_sequence(run, assumed)
    return tuple(
        Seed(
            data=data // group // within,
            group=group,
            tensor=tensor,
            stages=stages,
            chunks=chunks[count],
            schedule="interleaved" if chunks[count] > 1 else "1f1b",
            context=context,
            expert=within,
            experts_over=over,
            zero=zero,
            num_microbatches=count,
            sequence=sequence,
        )
        for count in counts
    ), batch


def _degrees(run: PublishedRun) -> tuple[int, int, int, int, int]:
    """Return the data, tensor, pipeline, context and expert degrees, which must make up the devices."""
    tensor, stages, context, expert = (one or 1 for one in (run.tp, run.pp, run.cp, run.ep))
    data, left = divmod(run.gpus, tensor * stages * context)
    named = run.dp or data
    if left or not data or named != data:
        raise Inexpressible(
            "degrees and devices disagree",
            f"tp {tensor} x pp {stages} x cp {context} x dp {named} on {run.gpus}",
        )
    if (run.experts or expert) % expert:
        raise Inexpressible("experts do not divide", f"ep {expert}, {run.experts} experts")
    return data, tensor, stages, context, expert


def _experts_over(
    run: PublishedRun, data: int, tensor: int, context: int
) -> tuple[int, BesideData]:
    """Return over how many data-parallel devices experts lie, and which other axes split them as well: those that
    their degree takes (Megatron-Core's groups of experts may reach over all but the stages)."""
    expert, sizes = run.ep or 1, {"context": context, "tensor": tensor}
    within = math.gcd(expert, data)
    for over in BESIDE_DATA:
        if within * math.prod(sizes[axis] for axis in over) == expert:
            return within, over
    raise Inexpressible(
        "experts in part of an axis", f"ep {expert}, dp {data} x cp {context} x tp {tensor}"
    )


def _is_sequence(run: PublishedRun, assumed: list[str]) -> bool:
    """Whether activations between the tensor-parallel regions are split too."""
    if run.seq_parallel:
        return is_yes(run.seq_parallel)
    usual = is_titan(run) or (software_of(run) == "megatron" and run.software_date >= "2023")
    assumed.append("sequence parallel" if usual else "no sequence parallel")
    return usual


def _batches(run: PublishedRun, data: int) -> tuple[tuple[int, ...], int]:
    """Return the numbers of microbatches that are possible, and samples per step."""
    micro, count, batch = run.micro_batch, run.grad_accum, run.global_batch
    if batch is None:
        raise Inexpressible("batch not published", "no global_batch")
    if batch * run.seq > MOST_TOKENS:
        raise Inexpressible("batch does not divide", f"{batch} samples of {run.seq} tokens a step")
    if micro is None and count is not None and batch % (count * data) == 0:
        micro = batch // (count * data)
    sizes = usual_microbatches(run, batch // data) if micro is None else (micro,)
    counts = tuple(batch // (size * data) for size in sizes if batch % (size * data) == 0)
    if not counts:
        raise Inexpressible("batch does not divide", f"{batch} by {sizes[0]} x dp {data}")
    return counts, batch


def _sharding(run: PublishedRun, data: int) -> tuple[int, int]:
    """Return the ZeRO stage and the size of its groups (1: all data-parallel devices)."""
    text = re.sub(r"(?:no|without) (?:cpu )?offload\w*", "", run.sharding.lower())
    if mentions(text, ON_HOST):
        raise Inexpressible("states kept on the host", run.sharding)
    zero, group = _zero(text), _group(run, text)
    if zero == 3 and (run.pp or 1) > 1 and "fsdp" in run.sharding.lower():
        # PyTorch's pipelines gather a stage's parameters once a step, not once a microbatch, and add
        # gradients up whole until the last (torchtitan: ``reshard_after_forward=not pp_enabled``).
        zero = 1
    if not zero or not 1 < group < data:
        return (0 if group == 1 else zero), 1
    if data % group:
        raise Inexpressible("batch does not divide", f"dp {data} in groups of {group}")
    return zero, group


def _group(run: PublishedRun, text: str) -> int:
    """Return over how many devices states are sharded as words of sharding say it, 0 where not."""
    grouped = re.search(
        r"group(?: of| size)? (\d{1,9})|(?:\b|_)shard(?:ed|ing)?[ =:]+(\d{1,9})", text
    )
    if grouped:
        return int(grouped[1] or grouped[2])
    return (run.gpus_per_node or 8) if "hybrid" in text or "hsdp" in text else 0


def _zero(text: str) -> int:
    """Return the ZeRO stage that words of sharding mean. Raises Inexpressible for others."""
    plain = re.sub(r"[-_ ]+", " ", text)
    stage = re.search(r"(?:zero|\bz|\bstage) ?(?:stage ?)?([0-3])\b|^([0-3])$", plain)
    if stage and "no zero" not in plain:
        return int(stage[1] or stage[2])
    for words, zero in SHARDINGS:
        if mentions(plain, words):
            return zero
    if is_no(text):
        return 0
    raise Inexpressible("sharding in other words", text)
