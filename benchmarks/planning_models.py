"""Models of the planning benchmark that have no `hf:` name of their own, built without weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def language_model(task: str, kind: str, **fields: int) -> nn.Module:
    import transformers

    config = transformers.AutoConfig.for_model(kind, **fields)
    config.use_cache = False
    model: nn.Module = getattr(transformers, task).from_config(config, attn_implementation="sdpa")
    return model


def _tokens(batch_size: int, seq: int) -> dict[str, Tensor]:
    tokens = torch.zeros(batch_size, seq, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens}


def deep_gpt(layers: int = 1024) -> nn.Module:
    """Build the deep, narrow GPT on which Aceso counts its search time."""
    return language_model(
        "AutoModelForCausalLM", "gpt2",
        n_layer=layers, n_embd=1024, n_head=16, vocab_size=50257, n_positions=1024,
    )  # fmt: skip


def gpt_16() -> nn.Module:
    """Build 16 layers, for the growth with layers."""
    return deep_gpt(16)


def gpt_64() -> nn.Module:
    """Build 64 layers."""
    return deep_gpt(64)


def gpt_256() -> nn.Module:
    """Build 256 layers."""
    return deep_gpt(256)


def gpt_512() -> nn.Module:
    """Build 512 layers."""
    return deep_gpt(512)


def bert_32() -> nn.Module:
    """Build BERT with 32 layers, as Piper plans it (hidden size 1,024)."""
    return language_model(
        "AutoModelForMaskedLM", "bert",
        num_hidden_layers=32, hidden_size=1024, num_attention_heads=16, intermediate_size=4096,
    )  # fmt: skip


def example_batch(batch_size: int, seq: int = 1024) -> dict[str, Tensor]:
    """Return tokens and the same as labels."""
    return _tokens(batch_size, seq)
