"""Known models of images, speech and several senses, and what a model of each type is trained for."""

from __future__ import annotations

from shardwright.runtime.capture.configs import (
    DECODERS,
    ENCODERS,
    EXPERTS,
    PAIRS,
    RECURRENT,
    Fields,
)

_TINY_VISION = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
    "image_size": 32, "patch_size": 8,
}  # fmt: skip
# SpecAugment and layer dropping draw random numbers in Python, which no graph can hold.
_SPEECH = {"layerdrop": 0.0, "apply_spec_augment": False}
_TINY_SPEECH = _SPEECH | {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
    "conv_dim": [32] * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
    "classifier_proj_size": 32, "num_labels": 8,
}  # fmt: skip
_CLASSES = {"num_labels": 1000}

VISION: dict[str, Fields] = {
    "vit-base": _CLASSES | {"model_type": "vit"},
    "vit-tiny": _TINY_VISION | {"model_type": "vit", "num_labels": 8},
    "deit-base": _CLASSES | {"model_type": "deit"},
    "deit-tiny": _TINY_VISION | {"model_type": "deit", "num_labels": 8},
    "swin-base": _CLASSES | {
        "model_type": "swin", "embed_dim": 128, "depths": [2, 2, 18, 2],
        "num_heads": [4, 8, 16, 32],
    },
    "swin-tiny": {
        "model_type": "swin", "num_labels": 8, "image_size": 32, "patch_size": 2, "embed_dim": 16,
        "depths": [2, 2], "num_heads": [2, 4], "window_size": 4,
    },
    "convnext-base": _CLASSES | {
        "model_type": "convnext", "hidden_sizes": [128, 256, 512, 1024], "depths": [3, 3, 27, 3],
    },
    "convnext-tiny": {
        "model_type": "convnext", "num_labels": 8, "image_size": 64,
        "hidden_sizes": [16, 32, 32, 64], "depths": [1, 1, 2, 1],
    },
    "resnet-50": _CLASSES | {"model_type": "resnet"},
    "resnet-tiny": {
        "model_type": "resnet", "num_labels": 8, "embedding_size": 8, "hidden_sizes": [16, 32],
        "depths": [3, 2], "image_size": 32,
    },
    "segformer-b0": {"model_type": "segformer", "num_labels": 150},
    "segformer-tiny": {
        "model_type": "segformer", "num_labels": 8, "image_size": 64,
        "hidden_sizes": [16, 32, 32, 64], "depths": [1, 1, 1, 1],
        "num_attention_heads": [1, 2, 2, 4], "decoder_hidden_size": 32,
    },
}  # fmt: skip

SPEECH: dict[str, Fields] = {
    "wav2vec2-base": _SPEECH | {"model_type": "wav2vec2", "num_labels": 35},
    "wav2vec2-tiny": _TINY_SPEECH | {"model_type": "wav2vec2"},
    "hubert-base": _SPEECH | {"model_type": "hubert", "num_labels": 35},
    "hubert-tiny": _TINY_SPEECH | {"model_type": "hubert"},
    "whisper-small": {
        "model_type": "whisper", "d_model": 768, "encoder_layers": 12, "decoder_layers": 12,
        "encoder_attention_heads": 12, "decoder_attention_heads": 12, "encoder_ffn_dim": 3072,
        "decoder_ffn_dim": 3072,
    },
    "whisper-tiny": {
        "model_type": "whisper", "vocab_size": 256, "num_mel_bins": 16, "d_model": 64,
        "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128,
        "max_source_positions": 64, "max_target_positions": 32, "pad_token_id": 0,
        "bos_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 2,
    },
}  # fmt: skip

SEVERAL_SENSES: dict[str, Fields] = {
    "clip-vit-base": {"model_type": "clip"},
    "clip-tiny": {
        "model_type": "clip", "projection_dim": 32,
        "text_config": {
            "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
            "intermediate_size": 128, "max_position_embeddings": 32, "bos_token_id": 0,
            "eos_token_id": 2,
        },
        "vision_config": _TINY_VISION,
    },
}  # fmt: skip

# The known names by the kind of model; the coverage page has a section for each.
FAMILIES: dict[str, dict[str, Fields]] = {
    "encoder": ENCODERS,
    "decoder": DECODERS,
    "encoder-decoder": PAIRS,
    "vision": VISION,
    "speech": SPEECH,
    "mixture of experts": EXPERTS,
    "recurrent, state space": RECURRENT,
    "several senses": SEVERAL_SENSES,
}
KNOWN_CONFIGS: dict[str, Fields] = {
    name: fields for family in FAMILIES.values() for name, fields in family.items()
}

# What a model is trained for: an automatic class of transformers, and what its batch holds (see
# ``MAKERS`` of ``huggingface``).
Task = tuple[str, str]
_NEXT = ("AutoModelForCausalLM", "tokens")
_MASKED = ("AutoModelForMaskedLM", "tokens")
_PAIRS = ("AutoModelForSeq2SeqLM", "pairs")
_TEXTS = ("AutoModelForSequenceClassification", "texts")
_WORDS = ("AutoModelForTokenClassification", "words")
_SPANS = ("AutoModelForQuestionAnswering", "spans")
_IMAGES = ("AutoModelForImageClassification", "images")
_MAPS = ("AutoModelForSemanticSegmentation", "maps")
_SOUNDS = ("AutoModelForAudioClassification", "sounds")
_SPECTROGRAMS = ("AutoModelForSpeechSeq2Seq", "spectrograms")
_PICTURES = ("AutoModelForImageTextToText", "pictures")
_RECORDINGS = ("AutoModelForMultimodalLM", "recordings")
_HEARD = ("AutoModelForSeq2SeqLM", "recordings")  # by where transformers lists some of these
CAPTIONS = ("AutoModel", "captions")
TASKS: dict[str, Task] = {
    **dict.fromkeys(("bert", "roberta", "distilbert", "albert", "electra", "deberta-v2"), _MASKED),
    **dict.fromkeys(("t5", "bart", "marian", "pegasus", "mbart", "switch_transformers"), _PAIRS),
    **dict.fromkeys(("vit", "resnet", "swin", "convnext"), _IMAGES),
    # Its automatic class is ambiguous: with a teacher and without.
    "deit": ("DeiTForImageClassification", "images"),
    "segformer": _MAPS,
    **dict.fromkeys(("wav2vec2", "hubert"), _SOUNDS),
    "whisper": _SPECTROGRAMS,
    "clip": CAPTIONS,
}
# What types that are not listed are tried as: the first that transformers has a class of theirs for.
USUAL_TASKS: tuple[Task, ...] = (
    _PAIRS, _NEXT, _MASKED, _RECORDINGS, _HEARD, _SPECTROGRAMS, _IMAGES, _MAPS, _SOUNDS, _TEXTS,
    _WORDS, _PICTURES,
)  # fmt: skip
# What the name of a class says; of several the first that transformers has a class of the type for.
TASK_ENDINGS: dict[str, tuple[Task, ...]] = {
    "ForCausalLM": (_NEXT, _PICTURES),
    "LMHeadModel": (_NEXT, _MASKED),
    "ForMaskedLM": (_MASKED,),
    "ForImageClassification": (_IMAGES,),
    "ForSemanticSegmentation": (_MAPS,),
    "ForAudioClassification": (_SOUNDS,),
    "ForSequenceClassification": (_TEXTS, _SOUNDS),
    "ForTokenClassification": (_WORDS,),
    "ForQuestionAnswering": (_SPANS,),
    "ForConditionalGeneration": (_PAIRS, _PICTURES, _RECORDINGS, _HEARD, _SPECTROGRAMS),
}
# The parts of a config of which a model has one for what a batch holds besides text.
SENSES = {"pictures": ("vision_config",), "recordings": ("audio_config", "encoder_config")}
