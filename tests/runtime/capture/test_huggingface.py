"""Config files of Hugging Face: which class and which batch they stand for, and what is said where none is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwright.errors import InputError
from shardwright.runtime.capture import capture, load_model

pytestmark = pytest.mark.torch

TEXT = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
    "intermediate_size": 64, "max_position_embeddings": 32, "pad_token_id": 0,
}  # fmt: skip


def config_file(folder: Path, kind: str, architecture: str | None, **fields: Any) -> str:
    """Write a config file and return its name."""
    path = folder / "config.json"
    named = {} if architecture is None else {"architectures": [architecture]}
    path.write_text(json.dumps({"model_type": kind} | named | fields))
    return f"hf:{path}"


@pytest.mark.parametrize(
    ("kind", "architecture", "entries"),
    [
        ("bert", "BertForSequenceClassification", {"input_ids", "labels"}),
        ("bert", "BertForTokenClassification", {"input_ids", "labels"}),
        ("bert", "BertForQuestionAnswering", {"input_ids", "start_positions", "end_positions"}),
        ("llama", "LlamaForSequenceClassification", {"input_ids", "labels"}),
    ],
)
def test_a_text_model_is_built_as_its_config_says_and_captured_whole(
    tmp_path: Path, kind: str, architecture: str, entries: set[str]
) -> None:
    source = load_model(config_file(tmp_path, kind, architecture, **TEXT))
    module, batch = source.build(), source.example(4, 8)
    assert type(module).__name__ == architecture
    assert set(batch) == entries
    graph = capture(module, batch).graph
    assert not any(op.kind.startswith("opaque") for op in graph.operators)


@pytest.mark.parametrize(
    ("kind", "built"),
    [
        ("mpnet", "MPNetForMaskedLM"),
        ("dinov2", "Dinov2ForImageClassification"),
        ("blenderbot", "BlenderbotForConditionalGeneration"),
        ("wavlm", "WavLMForSequenceClassification"),
        ("siglip", "SiglipModel"),
        ("chinese_clip", "ChineseCLIPModel"),
    ],
)
def test_a_type_without_architectures_is_tried_as_what_it_has(
    tmp_path: Path, kind: str, built: str
) -> None:
    source = load_model(config_file(tmp_path, kind, None))
    assert type(source.build()).__name__ == built
    assert all(len(tensor) == 2 for tensor in source.example(2).values())


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [
        ("sam", "SamModel"),
        ("videomae", "VideoMAEForVideoClassification"),
        ("time_series_transformer", None),
    ],
)
def test_a_model_whose_batch_is_not_known_is_refused_in_a_line(
    tmp_path: Path, kind: str, architecture: str | None
) -> None:
    said = (
        rf"no example batch is known for what a {kind} model .*{architecture or 'no arch'}.*file.py"
    )
    with pytest.raises(InputError, match=said):
        load_model(config_file(tmp_path, kind, architecture))


def test_a_config_that_does_not_say_what_a_batch_needs_is_refused(tmp_path: Path) -> None:
    spec = config_file(tmp_path, "speech_to_text", "Speech2TextForConditionalGeneration")
    with pytest.raises(
        InputError, match=r"no example batch of spectrograms.*num_mel_bins.*file.py"
    ):
        load_model(spec).example(2)


def test_a_model_of_any_number_of_positions_has_a_batch(tmp_path: Path) -> None:
    spec = config_file(tmp_path, "xlnet", "XLNetLMHeadModel", vocab_size=64)
    assert load_model(spec).example(2)["input_ids"].shape == (2, 128)


def test_a_model_that_cannot_be_built_is_refused_in_a_line(tmp_path: Path) -> None:
    spec = config_file(tmp_path, "bert", "BertForMaskedLM", hidden_size=30)
    with pytest.raises(
        InputError, match=r"cannot be built: ValueError.*multiple.*check the config$"
    ):
        load_model(spec).build()
