"""Models that `gpu.py` trains besides those of Hugging Face's configs, with their batches."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WORDS, CLASSES, PIXELS = 32_000, 1000, 224


def llama() -> nn.Module:
    """Return a Llama of 1.2 thousand million parameters, with torch's own attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=2048, intermediate_size=5632, num_hidden_layers=22,
        num_attention_heads=32, num_key_value_heads=4, max_position_embeddings=2048, use_cache=False,
    )  # fmt: skip
    return Told(LlamaForCausalLM(config))


class Told(nn.Module):
    """A language model whose loss is that of the next token."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy."""
        scores = self.model(input_ids=tokens, use_cache=False).logits
        return nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


class Seen(nn.Module):
    """A classifier of images with its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross entropy."""
        return nn.functional.cross_entropy(self.model(images), labels)


def resnet() -> nn.Module:
    """Return ResNet-50."""
    from torchvision.models import resnet50

    return Seen(resnet50())


def vit() -> nn.Module:
    """Return ViT-B/16, without dropout."""
    from torchvision.models import vit_b_16

    return Seen(vit_b_16(dropout=0.0, attention_dropout=0.0))


def llama_batch(batch_size: int = 4, seq: int = 2048) -> dict[str, Tensor]:
    """Return words and those that follow."""
    words = torch.randint(WORDS, (batch_size, seq + 1), generator=torch.Generator().manual_seed(0))
    return {"tokens": words[:, :-1].contiguous(), "targets": words[:, 1:].contiguous()}


def example_batch(batch_size: int = 64) -> dict[str, Tensor]:
    """Return images and their classes."""
    draw = torch.Generator().manual_seed(0)
    images = torch.randn(batch_size, 3, PIXELS, PIXELS, generator=draw)
    return {"images": images, "labels": torch.arange(batch_size) % CLASSES}
