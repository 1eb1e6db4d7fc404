"""Known model shapes, by the names people use: Hugging Face config fields, nothing downloaded."""

from __future__ import annotations

from typing import Any

_GPT2 = {"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024}
_LLAMA = {"model_type": "llama", "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
_LLAMA3 = _LLAMA | {
    "vocab_size": 128256, "rope_theta": 500000.0, "max_position_embeddings": 8192,
    "num_key_value_heads": 8,
}  # fmt: skip
_T5 = {
    "model_type": "t5", "vocab_size": 32128, "decoder_start_token_id": 0, "pad_token_id": 0,
    "eos_token_id": 1, "feed_forward_proj": "relu",
}  # fmt: skip
_TINY = {"vocab_size": 256, "bos_token_id": 0, "eos_token_id": 0}

KNOWN_CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": _GPT2 | {"n_embd": 768, "n_layer": 12, "n_head": 12},
    "gpt2-medium": _GPT2 | {"n_embd": 1024, "n_layer": 24, "n_head": 16},
    "gpt2-large": _GPT2 | {"n_embd": 1280, "n_layer": 36, "n_head": 20},
    "gpt2-xl": _GPT2 | {"n_embd": 1600, "n_layer": 48, "n_head": 25},
    "gpt2-tiny": _GPT2 | _TINY | {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "llama2-7b": _LLAMA | {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
    },
    "llama3-8b": _LLAMA3 | {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "llama3-70b": _LLAMA3 | {
        "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
    "llama3.1-405b": _LLAMA3 | {
        "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126,
        "num_attention_heads": 128, "max_position_embeddings": 131072,
    },
    "llama-tiny": _LLAMA | _TINY | {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    },
    "bert-base": {"model_type": "bert", "vocab_size": 30522},
    "bert-large": {
        "model_type": "bert", "vocab_size": 30522, "hidden_size": 1024, "num_hidden_layers": 24,
        "num_attention_heads": 16, "intermediate_size": 4096,
    },
    "bert-tiny": {
        "model_type": "bert", "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "intermediate_size": 128, "max_position_embeddings": 128,
    },
    "t5-small": _T5 | {
        "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8,
    },
    "t5-base": _T5 | {
        "d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12,
    },
    "t5-tiny": _T5 | {
        "vocab_size": 256, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4,
    },
    "vit-base": {"model_type": "vit", "num_labels": 1000},
    "vit-tiny": {
        "model_type": "vit", "num_labels": 8, "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "intermediate_size": 128, "image_size": 32, "patch_size": 8,
    },
    "resnet-50": {"model_type": "resnet", "num_labels": 1000},
    "resnet-tiny": {
        "model_type": "resnet", "num_labels": 8, "embedding_size": 8, "hidden_sizes": [16, 32],
        "depths": [3, 2], "image_size": 32,
    },
    "mixtral-8x7b": {
        "model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "max_position_embeddings": 32768, "rope_theta": 1e6,
        "num_local_experts": 8, "num_experts_per_tok": 2,
    },
    "mixtral-tiny": _TINY | {
        "model_type": "mixtral", "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 128, "num_local_experts": 4, "num_experts_per_tok": 2,
    },
}  # fmt: skip

# What a model of each type is trained for: its class, and whether its batch holds tokens, masked
# tokens, source and target tokens, or images. Types not listed are tried as causal language models.
TASKS: dict[str, tuple[str, str]] = {
    "bert": ("AutoModelForMaskedLM", "tokens"),
    "roberta": ("AutoModelForMaskedLM", "tokens"),
    "distilbert": ("AutoModelForMaskedLM", "tokens"),
    "t5": ("AutoModelForSeq2SeqLM", "pairs"),
    "bart": ("AutoModelForSeq2SeqLM", "pairs"),
    "vit": ("AutoModelForImageClassification", "images"),
    "resnet": ("AutoModelForImageClassification", "images"),
    "swin": ("AutoModelForImageClassification", "images"),
    "convnext": ("AutoModelForImageClassification", "images"),
}
