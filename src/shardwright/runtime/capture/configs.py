"""Known language models, by the names people use: Hugging Face config fields, nothing downloaded.

``...-tiny`` are miniatures for trials, not published models. Fields that are left out have the
defaults of the config class, which are mostly those of the base size.
"""

from __future__ import annotations

from typing import Any

Fields = dict[str, Any]

_TINY = {"vocab_size": 256}
_ENDS = {"bos_token_id": 0, "eos_token_id": 0}
_TINY_ENCODER = _TINY | {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
    "max_position_embeddings": 128,
}  # fmt: skip
_TINY_DECODER = _TINY_ENCODER | _ENDS
_TINY_GROUPED = _TINY_DECODER | {"num_key_value_heads": 2}
_TINY_PAIR = _TINY | {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128,
    "max_position_embeddings": 128,
}  # fmt: skip

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
_DEBERTA = {
    "model_type": "deberta-v2", "relative_attention": True, "position_buckets": 256,
    "norm_rel_ebd": "layer_norm", "share_att_key": True, "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False, "type_vocab_size": 0,
}  # fmt: skip
_MARIAN = {"model_type": "marian", "eos_token_id": 0}

ENCODERS: dict[str, Fields] = {
    "bert-base": {"model_type": "bert", "vocab_size": 30522},
    "bert-large": {
        "model_type": "bert", "vocab_size": 30522, "hidden_size": 1024, "num_hidden_layers": 24,
        "num_attention_heads": 16, "intermediate_size": 4096,
    },
    "bert-tiny": _TINY_ENCODER | {"model_type": "bert"},
    "roberta-base": {
        "model_type": "roberta", "vocab_size": 50265, "max_position_embeddings": 514,
        "type_vocab_size": 1,
    },
    "roberta-tiny": _TINY_ENCODER | {"model_type": "roberta", "max_position_embeddings": 130},
    "distilbert-base": {"model_type": "distilbert"},
    "distilbert-tiny": _TINY | {
        "model_type": "distilbert", "dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 128,
        "max_position_embeddings": 128,
    },
    "deberta-v3-base": _DEBERTA | {
        "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
        "intermediate_size": 3072,
    },
    "deberta-tiny": _DEBERTA | _TINY_ENCODER | {"position_buckets": 32, "pooler_hidden_size": 64},
    "albert-base": {
        "model_type": "albert", "hidden_size": 768, "num_attention_heads": 12,
        "intermediate_size": 3072,
    },
    "albert-tiny": _TINY_ENCODER | {"model_type": "albert", "embedding_size": 32},
    "electra-base": {
        "model_type": "electra", "hidden_size": 768, "embedding_size": 768,
        "num_attention_heads": 12, "intermediate_size": 3072,
    },
    "electra-tiny": _TINY_ENCODER | {"model_type": "electra", "embedding_size": 32},
}  # fmt: skip

DECODERS: dict[str, Fields] = {
    "gpt2": _GPT2 | {"n_embd": 768, "n_layer": 12, "n_head": 12},
    "gpt2-medium": _GPT2 | {"n_embd": 1024, "n_layer": 24, "n_head": 16},
    "gpt2-large": _GPT2 | {"n_embd": 1280, "n_layer": 36, "n_head": 20},
    "gpt2-xl": _GPT2 | {"n_embd": 1600, "n_layer": 48, "n_head": 25},
    "gpt2-tiny": _GPT2 | _TINY | _ENDS | {
        "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128,
    },
    "gpt-neox-20b": {"model_type": "gpt_neox"},
    "gpt-neox-tiny": _TINY_DECODER | {"model_type": "gpt_neox"},
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
    "llama-tiny": _LLAMA | _TINY_GROUPED,
    "mistral-7b": {"model_type": "mistral"},
    "mistral-tiny": _TINY_GROUPED | {"model_type": "mistral"},
    "qwen2-7b": {
        "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584, "rope_theta": 1e6,
        "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "qwen2-tiny": _TINY_GROUPED | {"model_type": "qwen2"},
    "gemma-7b": {"model_type": "gemma"},
    "gemma-tiny": _TINY_GROUPED | {"model_type": "gemma", "head_dim": 16},
    "opt-1.3b": {
        "model_type": "opt", "hidden_size": 2048, "ffn_dim": 8192, "num_hidden_layers": 24,
        "num_attention_heads": 32, "word_embed_proj_dim": 2048,
    },
    "opt-tiny": _TINY_ENCODER | {
        "model_type": "opt", "ffn_dim": 128, "word_embed_proj_dim": 64,
    },
    "bloom-560m": {
        "model_type": "bloom", "vocab_size": 250880, "hidden_size": 1024, "n_layer": 24,
        "n_head": 16,
    },
    "bloom-tiny": _TINY | _ENDS | {
        "model_type": "bloom", "hidden_size": 64, "n_layer": 2, "n_head": 4,
    },
    "falcon-7b": {"model_type": "falcon"},
    "falcon-tiny": _TINY_DECODER | {"model_type": "falcon"},
    "phi-2": {
        "model_type": "phi", "hidden_size": 2560, "intermediate_size": 10240,
        "num_hidden_layers": 32, "num_attention_heads": 32, "partial_rotary_factor": 0.4,
    },
    "phi-tiny": _TINY_DECODER | {"model_type": "phi"},
}  # fmt: skip

PAIRS: dict[str, Fields] = {
    "t5-small": _T5 | {
        "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8,
    },
    "t5-base": _T5 | {
        "d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12,
    },
    "t5-tiny": _T5 | {
        "vocab_size": 256, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4,
    },
    "bart-base": {
        "model_type": "bart", "d_model": 768, "encoder_layers": 6, "decoder_layers": 6,
        "encoder_attention_heads": 12, "decoder_attention_heads": 12, "encoder_ffn_dim": 3072,
        "decoder_ffn_dim": 3072,
    },
    "bart-tiny": _TINY_PAIR | {"model_type": "bart"},
    "marian-base": _MARIAN | {
        "d_model": 512, "encoder_layers": 6, "decoder_layers": 6, "encoder_attention_heads": 8,
        "decoder_attention_heads": 8, "encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048,
    },
    "marian-tiny": _MARIAN | _TINY_PAIR | {"pad_token_id": 1, "decoder_start_token_id": 1},
    "pegasus-large": {"model_type": "pegasus", "vocab_size": 96103, "d_model": 1024},
    "pegasus-tiny": _TINY_PAIR | {"model_type": "pegasus"},
    "mbart-large": {"model_type": "mbart", "vocab_size": 250027},
    "mbart-tiny": _TINY_PAIR | {"model_type": "mbart"},
}  # fmt: skip

EXPERTS: dict[str, Fields] = {
    "mixtral-8x7b": {
        "model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "max_position_embeddings": 32768, "rope_theta": 1e6,
        "num_local_experts": 8, "num_experts_per_tok": 2,
    },
    "mixtral-tiny": _TINY_GROUPED | {
        "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2,
    },
    "qwen1.5-moe-a2.7b": {"model_type": "qwen2_moe", "vocab_size": 151936},
    "qwen2-moe-tiny": _TINY_GROUPED | {
        "model_type": "qwen2_moe", "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
    },
    "switch-base-8": {"model_type": "switch_transformers", "decoder_start_token_id": 0},
    "switch-tiny": _TINY | {
        "model_type": "switch_transformers", "d_model": 64, "d_kv": 16, "d_ff": 128,
        "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4, "num_experts": 4,
        "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "router_jitter_noise": 0.0,
        "decoder_start_token_id": 0, "pad_token_id": 0,
    },
}  # fmt: skip

RECURRENT: dict[str, Fields] = {
    "mamba-130m": {
        "model_type": "mamba", "vocab_size": 50280, "hidden_size": 768, "num_hidden_layers": 24,
    },
    "mamba-tiny": _TINY | {
        "model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8,
    },
    "mamba2-130m": {
        "model_type": "mamba2", "vocab_size": 50288, "hidden_size": 768, "num_hidden_layers": 24,
        "num_heads": 24, "head_dim": 64, "n_groups": 1,
    },
    "mamba2-tiny": _TINY | {
        "model_type": "mamba2", "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 8,
        "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 16,
    },
    "rwkv-169m": {
        "model_type": "rwkv", "hidden_size": 768, "num_hidden_layers": 12, "context_length": 1024,
    },
    "rwkv-tiny": _TINY | {
        "model_type": "rwkv", "hidden_size": 64, "num_hidden_layers": 2, "context_length": 64,
    },
}  # fmt: skip
