"""Miniatures of architectures of transformers without an ``hf:`` name, for ``outside.py``.

A line per architecture: its class, what differs from the class's own config, and what its batch holds.
"""

from __future__ import annotations

from typing import Any

import torch
from outside_models import Example, floats, tokens

TEXT = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 64, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = TEXT | {"num_key_value_heads": 2}
IMAGE = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "image_size": 32, "patch_size": 8,
}  # fmt: skip
SOUND = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "conv_dim": [16] * 3, "conv_stride": [4, 2, 2], "conv_kernel": [8, 3, 3],
    "num_feat_extract_layers": 3, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
    "vocab_size": 16, "pad_token_id": 0,
}  # fmt: skip
RESNET = {
    "model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1],
    "layer_type": "basic", "out_features": ["stage1", "stage2"],
}  # fmt: skip
LINE = tuple[str, dict[str, Any], str]

CONFIGS: dict[str, LINE] = {
    "bloom": ("BloomForCausalLM", {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4}, "text"),
    "falcon_multi_query": ("FalconForCausalLM", TEXT | {"multi_query": True, "new_decoder_architecture": False}, "text"),
    "falcon_new": ("FalconForCausalLM", TEXT | {"num_kv_heads": 2, "new_decoder_architecture": True}, "text"),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}, "text"),
    "gemma2": ("Gemma2ForCausalLM", GROUPED | {"head_dim": 8}, "text"),
    "phi3": ("Phi3ForCausalLM", GROUPED, "text"),
    "mpt": ("MptForCausalLM", {"vocab_size": 64, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64}, "text"),
    "olmoe": ("OlmoeForCausalLM", GROUPED | {"num_experts": 4, "num_experts_per_tok": 2}, "text"),
    "longformer": ("LongformerForMaskedLM", TEXT | {"attention_window": 8, "max_position_embeddings": 80}, "text"),
    "big_bird": ("BigBirdForMaskedLM", TEXT | {"block_size": 4, "num_random_blocks": 1, "attention_type": "block_sparse", "max_position_embeddings": 128}, "long"),
    "reformer": ("ReformerForMaskedLM", {
        "vocab_size": 64, "hidden_size": 32, "num_attention_heads": 2, "attention_head_size": 16,
        "attn_layers": ["local", "lsh"], "axial_pos_shape": (4, 4), "axial_pos_embds_dim": (16, 16),
        "feed_forward_size": 64, "max_position_embeddings": 16, "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4, "num_buckets": 2, "is_decoder": False, "pad_token_id": 0,
    }, "text"),
    "deberta": ("DebertaForMaskedLM", TEXT | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}, "text"),
    "funnel": ("FunnelForMaskedLM", {"vocab_size": 64, "block_sizes": [1, 1], "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 64}, "text"),
    "fnet": ("FNetForMaskedLM", TEXT, "text"),
    "xlnet": ("XLNetLMHeadModel", {"vocab_size": 64, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64}, "text"),
    "layoutlm": ("LayoutLMForMaskedLM", TEXT, "text"),
    "rwkv": ("RwkvForCausalLM", {"vocab_size": 64, "hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2, "context_length": 64}, "text"),
    "xlstm_hf": ("xLSTMForCausalLM", {"vocab_size": 64, "hidden_size": 32, "embedding_dim": 32, "num_hidden_layers": 2, "num_blocks": 2, "num_heads": 4}, "text"),
    "prophetnet": ("ProphetNetForConditionalGeneration", {
        "vocab_size": 64, "hidden_size": 32, "num_encoder_layers": 1, "num_decoder_layers": 1,
        "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4, "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64, "max_position_embeddings": 64,
    }, "text"),
    "led": ("LEDForConditionalGeneration", {
        "vocab_size": 64, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "attention_window": 8,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64, "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64,
        "pad_token_id": 0, "decoder_start_token_id": 2,
    }, "text"),
    "detr": ("DetrForObjectDetection", {
        "use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None,
        "backbone_config": RESNET, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1,
        "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32,
        "decoder_ffn_dim": 32, "num_queries": 5, "num_labels": 4,
    }, "boxes"),
    "mask2former": ("Mask2FormerForUniversalSegmentation", {
        "use_pretrained_backbone": False, "feature_size": 32, "mask_feature_size": 32, "hidden_dim": 32,
        "encoder_feedforward_dim": 32, "dim_feedforward": 32, "encoder_layers": 1, "decoder_layers": 2,
        "num_attention_heads": 4, "num_queries": 5, "num_labels": 4, "train_num_points": 16,
        "backbone_config": {
            "model_type": "swin", "image_size": 64, "embed_dim": 8, "depths": [1, 1, 1, 1],
            "num_heads": [1, 1, 1, 1], "window_size": 2,
            "out_features": ["stage1", "stage2", "stage3", "stage4"],
        },
    }, "masks"),
    "swinv2": ("Swinv2ForImageClassification", {
        "image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4],
        "window_size": 4, "num_labels": 8,
    }, "image"),
    "convnextv2": ("ConvNextV2ForImageClassification", {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1], "image_size": 32, "num_labels": 8}, "image"),
    "mobilenet_v2": ("MobileNetV2ForImageClassification", {"image_size": 32, "num_labels": 8, "depth_multiplier": 0.35}, "image"),
    "beit": ("BeitForImageClassification", IMAGE | {"num_labels": 8}, "image"),
    "dinov2": ("Dinov2ForImageClassification", IMAGE | {"num_labels": 8}, "image"),
    "vit_mae": ("ViTMAEForPreTraining", IMAGE | {"decoder_hidden_size": 32, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 4, "decoder_intermediate_size": 64}, "pixels"),
    "siglip": ("SiglipModel", {"text_config": TEXT | {"projection_size": 32}, "vision_config": IMAGE}, "caption"),
    "blip": ("BlipForConditionalGeneration", {
        "text_config": TEXT | {"encoder_hidden_size": 32}, "vision_config": IMAGE, "projection_dim": 32,
    }, "caption_lm"),
    "llava": ("LlavaForConditionalGeneration", {
        "text_config": GROUPED | {"model_type": "llama"}, "vision_config": IMAGE | {"model_type": "clip_vision_model"},
        "image_token_index": 63, "image_token_id": 63, "vision_feature_layer": -1, "vision_feature_select_strategy": "default",
    }, "llava"),
    "qwen2_vl": ("Qwen2VLForConditionalGeneration", {
        "text_config": GROUPED | {"rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [1, 1, 2]}},
        "vision_config": {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "mlp_ratio": 2},
        "image_token_id": 63, "video_token_id": 62, "vision_start_token_id": 61, "vision_end_token_id": 60,
    }, "qwen"),
    "sam": ("SamModel", {
        "vision_config": {
            "hidden_size": 32, "output_channels": 16, "num_pos_feats": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32,
            "patch_size": 8, "window_size": 2, "global_attn_indexes": [1], "mlp_dim": 64,
        },
        "prompt_encoder_config": {"hidden_size": 16, "image_size": 32, "patch_size": 8, "image_embedding_size": 4, "mask_input_channels": 8},
        "mask_decoder_config": {"hidden_size": 16, "mlp_dim": 32, "num_attention_heads": 2, "iou_head_hidden_dim": 16},
    }, "points"),
    "wav2vec2_ctc": ("Wav2Vec2ForCTC", SOUND | {"mask_time_length": 2}, "sound"),
    "wavlm_ctc": ("WavLMForCTC", SOUND | {"layerdrop": 0.0, "apply_spec_augment": False}, "sound"),
    "speech_to_text": ("Speech2TextForConditionalGeneration", {
        "vocab_size": 64, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "input_feat_per_channel": 8,
        "conv_channels": 16, "max_source_positions": 64, "max_target_positions": 64, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0,
    }, "spectrogram"),
    "encodec": ("EncodecModel", {
        "hidden_size": 16, "num_filters": 4, "num_residual_layers": 1, "upsampling_ratios": [2, 2], "num_lstm_layers": 1,
        "codebook_size": 16, "codebook_dim": 16, "sampling_rate": 160, "target_bandwidths": [1.5, 3.0], "norm_type": "weight_norm",
    }, "wave"),
    "musicgen": ("MusicgenForCausalLM", {
        "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64,
        "num_codebooks": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 0,
    }, "codes"),
    "vits": ("VitsModel", {"vocab_size": 64, "hidden_size": 16}, "skip"),
    "decision_transformer": ("DecisionTransformerModel", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "state_dim": 6, "act_dim": 3}, "rl"),
    "time_series": ("TimeSeriesTransformerForPrediction", {
        "prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2], "d_model": 16, "encoder_layers": 1,
        "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "num_time_features": 1,
    }, "series"),
    "patchtst": ("PatchTSTForPrediction", {"num_input_channels": 2, "context_length": 16, "patch_length": 4, "patch_stride": 4, "d_model": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "ffn_dim": 32, "prediction_length": 4}, "patches"),
}  # fmt: skip
CONFIGS = {name: line for name, line in CONFIGS.items() if line[2] != "skip"}


class Reconstruct(torch.nn.Module):
    """A model without a loss of its own, trained to give back what it is given."""

    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.net(x).audio_values, x)


class Regress(torch.nn.Module):
    """A model of several inputs whose chosen result is trained towards zero."""

    def __init__(self, net: torch.nn.Module, result: str, nested: bool = False) -> None:
        super().__init__()
        self.net, self.result = net, result

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        return getattr(self.net(**batch), self.result).pow(2).mean()


class Boxes(torch.nn.Module):
    """A detector, whose labels are one dict per image."""

    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(
        self, pixel_values: torch.Tensor, classes: torch.Tensor, boxes: torch.Tensor
    ) -> torch.Tensor:
        pairs = zip(classes, boxes, strict=True)
        labels = [{"class_labels": one, "boxes": box} for one, box in pairs]
        return self.net(pixel_values=pixel_values, labels=labels).loss


class Masks(torch.nn.Module):
    """A segmenter, whose labels are a list of masks per image."""

    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(
        self, pixel_values: torch.Tensor, classes: torch.Tensor, masks: torch.Tensor
    ) -> torch.Tensor:
        return self.net(
            pixel_values=pixel_values, mask_labels=list(masks), class_labels=list(classes)
        ).loss


def build(name: str, batch_size: int = 4) -> Example:
    """Build a miniature in training mode and its batch."""
    import transformers

    kind, fields, task = CONFIGS[name]
    chosen = getattr(transformers, kind)
    config = chosen.config_class(**fields)
    config.use_cache = False
    module = chosen(config)
    if task == "wave":
        return Reconstruct(module), {"x": floats(batch_size, 1, 64)}
    if task == "boxes":
        module = Boxes(module)
    if task == "masks":
        module = Masks(module)
    if task == "points":
        module = Regress(module, "pred_masks")
    if task == "rl":
        module = Regress(module, "action_preds")
    if task == "caption":
        module.forward = _with_loss(module.forward)
    return module, batch_of(task, batch_size)


def _with_loss(forward: Any) -> Any:
    from functools import partial

    return partial(forward, return_loss=True)


def batch_of(task: str, n: int) -> dict[str, torch.Tensor]:
    """Return what a batch of a task holds, for ``n`` samples."""
    text = tokens(60, n, 64 if task == "long" else 16, low=3)
    image = {
        "pixel_values": floats(n, 3, 64 if task == "masks" else 32, 64 if task == "masks" else 32)
    }
    if task in ("text", "long"):
        return {"input_ids": text, "labels": text.clone()}
    if task == "image":
        return image | {"labels": tokens(8, n)}
    if task == "pixels":
        return image | {"noise": floats(n, 16)}  # which patches are masked
    if task in ("caption", "caption_lm"):
        more = {"labels": text.clone()} if task == "caption_lm" else {}
        return image | {"input_ids": text} | more
    if task == "llava":
        text[:, 2:18] = 63
        marked = torch.cat([text, tokens(60, n, 8, low=3)], 1)
        marked[:, 2:18] = 63
        return image | {"input_ids": marked, "labels": marked.clone()}
    if task == "qwen":
        text[:, 2], text[:, 3:7], text[:, 7] = 61, 63, 60
        grid = torch.tensor([[1, 4, 4]]).repeat(n, 1)
        return {
            "input_ids": text, "labels": text.clone(), "pixel_values": floats(n * 16, 96),
            "image_grid_thw": grid, "mm_token_type_ids": (text == 63).int(),
        }  # fmt: skip
    if task == "boxes":
        return image | {"classes": tokens(4, n, 2), "boxes": floats(n, 2, 4).sigmoid() / 2 + 0.2}
    if task == "masks":
        return image | {"classes": tokens(4, n, 2), "masks": tokens(2, n, 2, 64, 64).float()}
    if task == "points":
        return image | {
            "input_points": floats(n, 1, 2, 2).sigmoid() * 32,
            "input_labels": torch.ones(n, 1, 2).long(),
        }
    if task == "sound":
        return {"input_values": floats(n, 400), "labels": tokens(16, n, 4, low=1)}
    if task == "spectrogram":
        return {"input_features": floats(n, 32, 8), "labels": text}
    if task == "codes":
        return {"input_ids": tokens(64, n * 2, 16), "labels": tokens(64, n, 16, 2)}
    if task == "rl":
        return {
            "states": floats(n, 5, 6), "actions": floats(n, 5, 3), "rewards": floats(n, 5, 1),
            "returns_to_go": floats(n, 5, 1), "timesteps": torch.arange(5).repeat(n, 1),
            "attention_mask": torch.ones(n, 5),
        }  # fmt: skip
    if task == "series":
        return {
            "past_values": floats(n, 10), "past_time_features": floats(n, 10, 1),
            "past_observed_mask": torch.ones(n, 10), "future_values": floats(n, 4),
            "future_time_features": floats(n, 4, 1),
        }  # fmt: skip
    return {"past_values": floats(n, 16, 2), "future_values": floats(n, 4, 2)}
