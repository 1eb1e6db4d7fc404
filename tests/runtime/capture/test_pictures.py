"""Example batches of text with images among it: a model of transformers checks itself that as many tokens are marked as
its tower makes features."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright.errors import InputError
from shardwright.planner.lower import lower
from shardwright.planner.space import Seed, seed_strategy
from shardwright.runtime import verify
from shardwright.runtime.capture import capture, load_model
from shardwright.runtime.capture.mixed import IGNORED

pytestmark = pytest.mark.torch

SMALL = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
}  # fmt: skip
TEXT = SMALL | {
    "vocab_size": 40, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
TOWER = SMALL | {"model_type": "siglip_vision_model", "image_size": 16, "patch_size": 4}
GRIDS = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 4,
    "window_size": 16, "out_hidden_size": 32, "fullatt_block_indexes": [],
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llava": {
        "text_config": TEXT | {"model_type": "llama"}, "vision_config": TOWER, "image_token_index": 39,
        "vision_feature_select_strategy": "full",
    },
    "paligemma": {
        "text_config": TEXT | {"model_type": "gemma"}, "vision_config": TOWER | {"projection_dim": 32},
        "projection_dim": 32, "hidden_size": 32, "image_token_index": 39,
    },
    "llava_next": {
        "text_config": TEXT | {"model_type": "llama"}, "vision_config": TOWER, "image_token_index": 39,
        "vision_feature_select_strategy": "full", "image_grid_pinpoints": [[16, 16], [32, 32]],
    },
    "instructblip": {
        "text_config": TEXT | {"model_type": "llama"}, "image_token_index": 39, "num_query_tokens": 3,
        "qformer_config": SMALL | {
            "vocab_size": 20, "encoder_hidden_size": 32, "max_position_embeddings": 16,
        },
        "vision_config": SMALL | {"image_size": 16, "patch_size": 4},
    },
    "lfm2_vl": {
        "text_config": TEXT | {"model_type": "llama"}, "image_token_id": 39,
        "vision_config": SMALL | {"model_type": "siglip2_vision_model", "num_patches": 16, "patch_size": 4},
    },
    "smolvlm": {
        "text_config": TEXT | {"model_type": "llama"}, "image_token_id": 39, "scale_factor": 2,
        "vision_config": SMALL | {"image_size": 16, "patch_size": 4},
    },
    "qwen2_5_vl": {
        "text_config": TEXT | {
            "model_type": "qwen2_5_vl_text",
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
        },
        "vision_config": GRIDS, "image_token_id": 39, "video_token_id": 38,
        "vision_start_token_id": 37, "vision_end_token_id": 36,
    },
}  # fmt: skip


def config_file(folder: Path, kind: str) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps({"model_type": kind} | CONFIGS[kind]))
    return f"hf:{path}"


@pytest.mark.parametrize(
    ("kind", "features", "shape"),
    [
        ("llava", 16, (3, 3, 16, 16)),
        ("paligemma", 16, (3, 3, 16, 16)),
        # A tile of 16 features in 4 rows with a mark at the end of each, and one that shows all.
        ("llava_next", 36, (3, 2, 3, 16, 16)),
        ("instructblip", 3, (3, 3, 16, 16)),
        ("lfm2_vl", 4, (3, 16, 48)),
        ("smolvlm", 4, (3, 1, 3, 16, 16)),
        ("qwen2_5_vl", 16, (192, 96)),
    ],
)
def test_an_image_takes_as_many_tokens_as_its_tower_makes_features(
    tmp_path: Path, kind: str, features: int, shape: tuple[int, ...]
) -> None:
    source = load_model(config_file(tmp_path, kind))
    batch = source.example(3, 40)
    assert batch["pixel_values"].shape == shape
    is_image = batch["input_ids"] == 39
    assert is_image.sum(-1).tolist() == [features] * 3
    assert torch.equal(batch["labels"] == IGNORED, is_image)
    assert torch.isfinite(source.build("cpu")(**batch).loss)


def test_text_that_is_shorter_than_its_image_is_refused(tmp_path: Path) -> None:
    source = load_model(config_file(tmp_path, "llava"))
    with pytest.raises(
        InputError, match="takes 16 tokens, so that seq must be at least 18, not 17"
    ):
        source.example(2, 17)


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [("blip", "BlipForConditionalGeneration"), ("git", "GitForCausalLM")],
)
def test_a_model_without_a_mark_for_images_takes_them_beside_text(
    tmp_path: Path, kind: str, architecture: str
) -> None:
    own = TEXT if kind == "git" else {"text_config": TEXT | {"encoder_hidden_size": 32}}
    parts = {"vision_config": SMALL | {"image_size": 16, "patch_size": 4}}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": kind, "architectures": [architecture]} | own | parts))
    source = load_model(f"hf:{path}")
    batch = source.example(2, 8)
    assert {name: tuple(one.shape) for name, one in batch.items()} == {
        "input_ids": (2, 8), "labels": (2, 8), "pixel_values": (2, 3, 16, 16),
    }  # fmt: skip
    assert torch.isfinite(source.build("cpu")(**batch).loss)


def test_a_model_that_takes_no_pixels_by_name_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "kosmos-2.5"}))
    with pytest.raises(InputError, match=r"no example batch of pictures.*takes no pixel_values"):
        load_model(f"hf:{path}").example(2, 8)


def test_a_config_without_a_token_for_the_image_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    fields = {**CONFIGS["instructblip"], "image_token_index": None}
    path.write_text(json.dumps({"model_type": "instructblip"} | fields))
    with pytest.raises(InputError, match=r"no example batch of pictures.*it has no image_token_id"):
        load_model(f"hf:{path}").example(2)


def test_a_model_of_images_that_may_be_padding_is_captured_whole(tmp_path: Path) -> None:
    source = load_model(config_file(tmp_path, "smolvlm"))
    captured = capture(source.build("cpu"), source.sample(2, 8))
    assert not any(one.kind.startswith("opaque") for one in captured.graph.operators)
    assert [set(one.entries) for one in captured.filled] == [{"pixel_values"}]


def test_a_model_of_images_in_patches_is_captured_whole_and_trains_as_it_would(
    tmp_path: Path,
) -> None:
    source = load_model(config_file(tmp_path, "qwen2_5_vl"))
    torch.manual_seed(1)
    module = source.build("cpu").double()
    verify.switch_off_dropout(module)
    batch = {
        name: one.double() if one.is_floating_point() else one
        for name, one in source.sample(2, 12).items()
    }
    captured = capture(module, batch, global_batch=2)
    assert not any(one.kind.startswith("opaque") for one in captured.graph.operators)
    assert captured.fixed == {"image_grid_thw": (1, 4, 4)}
    plain = verify.train_plainly(module, [batch], clips=False, tell=lambda _: None)
    program = lower(captured.graph, seed_strategy(captured.graph, Seed(data=2)))
    trained = verify.train_here(captured, program, module, [batch], lambda _: None)
    found = verify.gaps(trained, plain, captured)
    assert found[0].difference < verify.SINGLE_TOLERANCE  # norms and rotations are in float32
