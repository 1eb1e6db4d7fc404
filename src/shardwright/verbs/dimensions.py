"""The decoder that a published run says, its dimensions and the kernels that its software runs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from shardwright.core.counts import read_count
from shardwright.core.decoder import Decoder
from shardwright.files.runs import MOST_WIDTH, PublishedRun

# Parameters that differ from the printed ones by more would be another model.
SAME_SIZE = 0.1
# Since when training decoders without a fused attention is unusual.
FLASH_SINCE = "2023"
# Beginnings of words for what is no decoder of attention and feed-forward layers alone.
OTHERS = (
    "encoder",
    "vit\\b",
    "bert",
    "t5",
    "mamba",
    "ssm",
    "rwkv",
    "linear attention",
    "diffusion",
)
# Since when PyTorch has one kernel for RMS norms (2.9), and grouped products by CUTLASS (2.8).
NORMS_SINCE, GROUPED_SINCE = "2025-10", "2025-08"
USUAL_VOCAB = 50304
# Vocabularies by families of models, where none is printed: the first that the name has.
VOCABULARIES = (("llama-?3", 128256), ("llama", 32000), ("mistral|mixtral", 32000), ("qwen", 152064),
                ("gemma", 256000), ("deepseek", 102400))  # fmt: skip
# Families whose feed-forward layers have a gate.
GATED = re.compile(
    r"llama|mistral|mixtral|qwen|gemma|deepseek|olmo|phi-?3|internlm|baichuan|\byi\b"
)
# What normalises queries and keys, in words or by its name.
NORMED = re.compile(r"\bqk[-_ ]?norm|olmoe|olmo[- ]?2|qwen[- ]?3|gemma[- ]?3")
# Parts of frameworks' names: kernels fused by hand, and by a compiler where the row does not say.
MEGATRON = ("megatron", "nemo", "internevo", "mcore", "megascale", "neox", "metaseq")
COMPILED = (
    "jax",
    "maxtext",
    "xla",
    "pax",
    "levanter",
    "alpa",
    "torch.compile",
    "compiled",
    "unsloth",
    "fast-llm",
)
USUAL_RANK = 32
USUAL_DROPOUT = 0.1
# Frameworks besides Megatron-LM and its kin whose cross entropy works in place.
IN_PLACE_SINCE = "2024"  # Megatron-LM's (core 0.5)
FUSED_LOSSES = ("composer", "foundry", "liger", "lit-gpt", "tinyllama")
# Frameworks that run eagerly, but with one kernel each for norms and for turning by positions.
HANDMADE = ("liger", "nanotron", "lit-gpt", "tinyllama")
LOSS_COMPILED_SINCE = "2025-04"  # torchtitan's
# Frameworks whose decoders make queries, keys, values, gates and what these gate by a product each.
APART = ("titan", "hf", "hugging", "transformers")


class Inexpressible(Exception):
    """A run that cannot be planned as it is printed: ``reason`` for counting, ``detail`` for reading."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


def mentions(text: str, words: Iterable[str]) -> bool:
    """Whether a text has one of some words."""
    return any(word in text for word in words)


def names(run: PublishedRun, words: Iterable[str]) -> bool:
    """Whether a run's framework is one of some."""
    return mentions(run.framework.lower(), words)


def is_titan(run: PublishedRun) -> bool:
    """Whether a run is of torchtitan."""
    return names(run, ("titan",))


def is_no(text: str) -> bool:
    """Whether a cell says no; a blank one does."""
    return text.strip().lower() in ("", "no", "none", "false", "off", "0", "disabled", "n")


def is_yes(text: str) -> bool:
    """Whether a cell says yes, and perhaps more."""
    return re.match(r"(?:yes|y|true|on|enabled?)\b|1$", text.strip().lower()) is not None


def software_of(run: PublishedRun) -> str:
    """Name how a run's kernels were made: ``megatron`` (fused by hand), ``compiled`` or ``eager``."""
    name = run.framework.lower()
    if mentions(name, MEGATRON):
        return "megatron"
    is_compiled = not is_no(run.compile) and not run.compile.lower().startswith(("no", "eager"))
    if is_compiled or (not run.compile and mentions(name, COMPILED)):
        return "compiled"
    return "eager"


def decoder_of(run: PublishedRun, assumed: list[str]) -> Decoder:
    """Return the dimensions of a run's model; what is assumed is added to the list."""
    arch, made = run.arch.lower(), software_of(run)
    _check_decoder(run)
    gated = _is_gated(run)
    width = _width(run, gated, assumed)
    vocab = _vocab(run, assumed)
    experts, topk = _experts(run)
    activation = _activation(run, gated)
    rotary, learned = _positions(arch, gated or activation == "relu2")
    is_eager = made == "eager" and not names(run, HANDMADE)
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
        rotary=rotary,
        positions=learned,
        flash=_is_flash(run, assumed),
        fused=not is_eager,
        experts=experts,
        topk=topk,
        adapters=_rank(run, assumed),
        qk_norm=NORMED.search(f"{arch} {run.notes} {run.model}".lower()) is not None,
        stepwise=gated and is_eager and run.software_date < NORMS_SINCE,
        grouped=_grouped(run, made),
        sorts=is_eager,
        apart=names(run, APART),
        dropout=_dropout(run, gated, assumed),
        loss=_loss(run),
    )
    shape = replace(shape, shared=_shared(run, shape, assumed))
    shape = replace(shape, tied=_is_tied(run, shape))
    size = shape.num_parameters / 1e9
    if run.params_b is not None and abs(size / run.params_b - 1) > SAME_SIZE:
        assumed.append(f"{size:.3g} G parameters, {run.params_b:.3g} G printed")
    return shape


def _check_decoder(run: PublishedRun) -> None:
    """Refuse what is described as another sort of model."""
    arch = run.arch.lower()
    if re.search(rf"\b(?:{'|'.join(OTHERS)})", arch):
        raise Inexpressible("not a decoder", run.arch)
    if mentions(arch, ("mla", "latent")):
        raise Inexpressible("latent attention", "the columns do not tell its ranks")
    if run.heads % (run.kv_heads or run.heads):
        detail = f"{run.heads} heads share {run.kv_heads} of keys and values"
        raise Inexpressible("dimensions not published", detail)


def _grouped(run: PublishedRun, made: str) -> str:
    is_older = run.software_date < GROUPED_SINCE
    return "triton" if is_older and made != "megatron" else "cutlass"


def _is_gated(run: PublishedRun) -> bool:
    """Whether the feed-forward layers have a gate: as printed, or as the family of the model has."""
    ffn = run.ffn_type.lower()
    if mentions(ffn, ("glu", "silu", "gated")):
        return True
    is_named = bool(re.sub(r"\W*(?:dense|mlp|moe|mixture of experts)\W*", "", ffn))
    return not is_named and GATED.search(run.model.lower()) is not None


def _width(run: PublishedRun, gated: bool, assumed: list[str]) -> int:
    """Return the inner width of the feed-forward layers."""
    if run.ffn_hidden is not None:
        return run.ffn_hidden
    if gated:
        raise Inexpressible("dimensions not published", "no ffn_hidden")
    assumed.append(f"ffn_hidden {4 * run.hidden}")
    return 4 * run.hidden


def _vocab(run: PublishedRun, assumed: list[str]) -> int:
    """Return the number of tokens, padded to what tensor parallelism divides."""
    vocab = run.vocab
    if vocab is None:
        name = run.model.lower().replace(" ", "-")
        vocab = next((size for word, size in VOCABULARIES if re.search(word, name)), USUAL_VOCAB)
        assumed.append(f"vocab {vocab}")
    tensor = run.tp or 1
    if vocab % (tensor * 8):
        vocab += -vocab % (128 * tensor)
        assumed.append(f"vocab padded to {vocab}")
    return vocab


def _activation(run: PublishedRun, gated: bool) -> str:
    ffn = run.ffn_type.lower()
    if re.search(r"square|relu ?(?:\^|\*\*)? ?2|relu²", ffn):
        return "relu2"
    return "silu" if gated and "ge" not in ffn else "gelu"


def _positions(arch: str, is_later: bool) -> tuple[bool, bool]:
    """Return whether positions turn queries and keys, as in later models, and whether they are learned."""
    has_slopes, is_learned = "alibi" in arch, "learned" in arch
    turns = is_later or "rope" in arch or "rotary" in arch
    return turns and not has_slopes and not is_learned, is_learned or not (turns or has_slopes)


def _written(pattern: str, text: str) -> int:
    """Return the size that words of a row say, 0 where they say none. Raises Inexpressible for one that no model
    has."""
    found = re.search(pattern, text)
    if not found:
        return 0
    if size := read_count(found[1], MOST_WIDTH):
        return size
    raise Inexpressible("dimensions not published", found[0][:40])


def _experts(run: PublishedRun) -> tuple[int, int]:
    """Return the number of experts and how many each token goes to; 0 for a dense model."""
    if (run.experts or 1) == 1:
        if "moe" in f"{run.ffn_type} {run.arch}".lower():
            raise Inexpressible("dimensions not published", "no number of experts")
        return 0, 0
    if run.experts_topk is None:
        raise Inexpressible("dimensions not published", "no experts_topk")
    if run.experts_topk > (run.experts or 1):
        raise Inexpressible(
            "dimensions not published", f"{run.experts_topk} of {run.experts} experts"
        )
    return run.experts or 1, run.experts_topk


def _shared(run: PublishedRun, shape: Decoder, assumed: list[str]) -> int:
    """Return the width of the expert that all tokens go to, as active parameters tell."""
    text = f"{run.arch} {run.ffn_type} {run.notes}".lower()
    if not shape.experts or "shared" not in text:
        return 0
    if written := _written(r"shared experts? (?:of )?(\d{3,})", text):
        return written
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
    if written := _written(r"(?:rank|dim) ?=? ?(\d+)", run.notes.lower()):
        return written
    assumed.append(f"adapters of rank {USUAL_RANK} beside queries, keys and values")
    return USUAL_RANK


def _head_size(run: PublishedRun) -> int:
    text = f"{run.arch} {run.notes}".lower()
    if written := _written(r"head[_ ](?:dim|size)[ =:]*(\d+)", text):
        return written
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
        return not is_no(text) and not text.startswith(("no", "eager", "math"))
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
    """Name the kernel of cross entropy (``operators.keeping.kept``)."""
    name, made = run.framework.lower(), software_of(run)
    if made == "megatron":
        is_older = "" < run.software_date < IN_PLACE_SINCE and "megatron" in name
        return "copied" if is_older else "in place"
    if "nanotron" in name:
        return "copied"
    if is_titan(run) and made == "compiled" and run.software_date >= LOSS_COMPILED_SINCE:
        return "compiled"
    return "in place" if mentions(name, FUSED_LOSSES) else "log_softmax"
