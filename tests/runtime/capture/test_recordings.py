"""Example batches of text with sounds among it: a model of transformers checks itself that as many tokens are marked as
its tower makes features."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright.runtime.capture import load_model
from shardwright.runtime.capture.mixed import IGNORED

pytestmark = pytest.mark.torch

TEXT = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "vocab_size": 40, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
TOWER = {
    "d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32,
    "num_mel_bins": 8, "max_source_positions": 16,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_audio": {
        "text_config": TEXT | {"model_type": "qwen2"}, "audio_token_index": 39,
        "audio_config": TOWER | {"model_type": "qwen2_audio_encoder"},
    },
    "audioflamingo3": {
        "text_config": TEXT | {"model_type": "qwen2"}, "audio_token_id": 39,
        "audio_config": TOWER | {"model_type": "audioflamingo3_encoder"},
    },
    "granite_speech": {
        "text_config": TEXT | {"model_type": "granite"}, "audio_token_index": 39, "window_size": 25,
        "encoder_config": {
            "input_dim": 8, "num_layers": 1, "hidden_dim": 32, "num_heads": 2, "context_size": 25,
        },
        "projector_config": {
            "model_type": "blip_2_qformer", "hidden_size": 32, "num_hidden_layers": 1,
            "num_attention_heads": 2, "intermediate_size": 32, "encoder_hidden_size": 32,
        },
        "has_lora_adapter": False,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "features", "shapes"),
    [
        # Halved by a convolution, and by a pool.
        ("qwen2_audio", 8, {"input_features": (2, 8, 32), "feature_attention_mask": (2, 32)}),
        ("audioflamingo3", 8, {"input_features": (2, 8, 32), "input_features_mask": (2, 32)}),
        # A fifth of what no config says, whose frames come first.
        ("granite_speech", 200, {"input_features": (2, 1000, 8)}),
    ],
)
def test_a_sound_takes_as_many_tokens_as_its_tower_makes_features(
    tmp_path: Path, kind: str, features: int, shapes: dict[str, tuple[int, ...]]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": kind} | CONFIGS[kind]))
    source = load_model(f"hf:{path}")
    batch = source.example(2, 220)
    others = {
        name: tuple(one.shape) for name, one in batch.items() if name not in ("input_ids", "labels")
    }
    assert others == shapes
    is_sound = batch["input_ids"] == 39
    assert is_sound.sum(-1).tolist() == [features] * 2
    assert torch.equal(batch["labels"] == IGNORED, is_sound)
    assert torch.isfinite(source.build("cpu")(**batch).loss)
