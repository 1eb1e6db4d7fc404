"""Small models with loss, shared by the tests: each function returns ``(module, batch)``.

Every forward takes the batch's entries by name and returns the loss. Everything is deterministic,
without dropout, float64 unless told otherwise, and sizes divide by 2, 4 and 8 where a rule might
want to split them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Example = tuple[nn.Module, dict[str, Tensor]]
BATCH = 8
VOCABULARY = 256


def _tokens(*shape: int, high: int = VOCABULARY, seed: int = 1) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def _floats(*shape: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.to(dtype)


def _seeded(
    build: type[nn.Module], *args: object, dtype: torch.dtype, **kwargs: object
) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build(*args, **kwargs).to(dtype)


class Perceptron(nn.Module):
    """Linear layers with mean cross entropy."""

    def __init__(self, width: int, depth: int, classes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return F.cross_entropy(self.head(x), y)


def mlp(
    batch: int = BATCH, width: int = 16, depth: int = 3, dtype: torch.dtype = torch.float64
) -> Example:
    """Build a perceptron with ``depth`` equal hidden layers."""
    module = _seeded(Perceptron, width, depth, 8, dtype=dtype)
    return module, {"x": _floats(batch, width, dtype=dtype), "y": _tokens(batch, high=8)}


class Attention(nn.Module):
    """Multi-head self attention with separate projections."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x_BLD: Tensor) -> Tensor:
        batch, length, width = x_BLD.shape

        def heads_first(x: Tensor) -> Tensor:
            return x.view(batch, length, self.heads, width // self.heads).transpose(1, 2)

        mixed = F.scaled_dot_product_attention(
            heads_first(self.query(x_BLD)),
            heads_first(self.key(x_BLD)),
            heads_first(self.value(x_BLD)),
            is_causal=self.causal,
        )
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Layer(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """A GPT (causal) or BERT-like (not causal, some targets ignored) language model."""

    def __init__(
        self, *, width: int, heads: int, depth: int, length: int, tied: bool, causal: bool
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(length, width)
        self.layers = nn.ModuleList(Layer(width, heads, causal) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, VOCABULARY), targets.reshape(-1), ignore_index=-100)


def gpt(
    tied: bool = False,
    batch: int = BATCH,
    length: int = 16,
    width: int = 32,
    depth: int = 2,
    dtype: torch.dtype = torch.float64,
) -> Example:
    """Build a byte-level GPT, its head tied to its embedding or not."""
    module = _seeded(
        Transformer,
        width=width,
        heads=4,
        depth=depth,
        length=length,
        tied=tied,
        causal=True,
        dtype=dtype,
    )
    return module, {"tokens": _tokens(batch, length), "targets": _tokens(batch, length, seed=2)}


def bert(batch: int = BATCH, length: int = 16, dtype: torch.dtype = torch.float64) -> Example:
    """Build a masked language model; unevenly many targets per sample are ignored."""
    module = _seeded(
        Transformer, width=32, heads=4, depth=2, length=length, tied=True, causal=False, dtype=dtype
    )
    targets = _tokens(batch, length, seed=2)
    ignored = _tokens(batch, length, high=batch + 2, seed=3) > torch.arange(batch)[:, None]
    return module, {"tokens": _tokens(batch, length), "targets": targets.masked_fill(ignored, -100)}


class Fused(nn.Module):
    """Attention and a gated layer whose projections are one weight each, cut in three ways."""

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Embedding(VOCABULARY, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width, bias=False)
        self.gate = nn.Parameter(nn.Linear(8 * width, width).weight.detach().clone())
        self.shift = nn.Parameter(torch.zeros(8 * width))
        self.down = nn.Linear(4 * width, width)
        self.channels = nn.Linear(width, 2 * width, bias=False)
        self.back = nn.Linear(width, width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        batch, length, width = x.shape
        parts = self.qkv(x).split(width, dim=2)
        query, key, value = (
            part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        both = torch.addmm(self.shift, x.view(-1, width), self.gate).view(batch, length, -1)
        half = both.shape[-1] // 2
        x = x + self.down(F.silu(both[..., :half]) * both[..., half:])
        left, right = self.channels(x).transpose(1, 2).chunk(2, dim=1)
        x = x + self.back((left * right.sigmoid()).transpose(1, 2))
        return F.cross_entropy(self.head(x).view(-1, VOCABULARY), targets.view(-1))


def fused(batch: int = BATCH, length: int = 8, dtype: torch.dtype = torch.float64) -> Example:
    """Build a model of fused projections."""
    module = _seeded(Fused, dtype=dtype)
    return module, {"tokens": _tokens(batch, length), "targets": _tokens(batch, length, seed=2)}


class Experts(nn.Module):
    """Feed-forward experts as in GShard (arXiv:2006.16668, algorithm 1): every sample is a group,
    each token goes to its two best experts, and what exceeds an expert's capacity is dropped."""

    def __init__(self, width: int, experts: int, capacity: int) -> None:
        super().__init__()
        self.experts, self.capacity = experts, capacity
        self.gate = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) / width**0.5)

    def forward(self, x_GSD: Tensor) -> tuple[Tensor, Tensor]:
        odds_GSE = self.gate(x_GSD).softmax(-1)
        best_GSK, chosen_GSK = odds_GSE.topk(2, -1)
        mask_GSKE = F.one_hot(chosen_GSK, self.experts).to(x_GSD.dtype)
        # All first choices are seated before any second one.
        queue = mask_GSKE.transpose(1, 2).flatten(1, 2)
        before = (queue.cumsum(1) - queue).unflatten(1, (2, x_GSD.shape[1])).transpose(1, 2)
        place_GSK = (before * mask_GSKE).sum(-1)
        slot_GSKC = (place_GSK[..., None] == torch.arange(self.capacity)).to(x_GSD.dtype)
        weight_GSK = best_GSK / best_GSK.sum(-1, keepdim=True)
        dispatch = torch.einsum("gske,gskc->gsec", mask_GSKE, slot_GSKC)
        combine = torch.einsum("gske,gskc->gsec", mask_GSKE * weight_GSK[..., None], slot_GSKC)
        y_EGCD = torch.einsum("gsec,gsd->egcd", dispatch, x_GSD)
        y_EGCF = F.gelu(torch.einsum("egcd,edf->egcf", y_EGCD, self.up))
        y_EGCD = torch.einsum("egcf,efd->egcd", y_EGCF, self.down)
        balance_G = (odds_GSE.mean(1) * mask_GSKE[:, :, 0].mean(1)).sum(-1) * self.experts
        return torch.einsum("gsec,egcd->gsd", combine, y_EGCD), balance_G.mean()


class Switching(nn.Module):
    """A token classifier of expert layers, whose load-balancing loss is added to its own."""

    def __init__(self, width: int, experts: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.layers = nn.ModuleList(Experts(width, experts, 4) for _ in range(depth))
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x, total = self.embed(tokens), 0.0
        for norm, layer in zip(self.norms, self.layers, strict=True):
            y, balance = layer(norm(x))
            x, total = x + y, total + 0.01 * balance
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten()) + total


def switching(batch: int = BATCH, length: int = 8, dtype: torch.dtype = torch.float64) -> Example:
    """Build a mixture of 4 experts, 2 per token, with capacity for 4 tokens of a sample."""
    tokens, targets = _tokens(batch, length), _tokens(batch, length, seed=2)
    return _seeded(Switching, 16, 4, 2, dtype=dtype), {"tokens": tokens, "targets": targets}


class Residual(nn.Module):
    """Two convolutions with normalisation around a shortcut."""

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(groups, channels) if groups else nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(groups, channels) if groups else nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return F.relu(x + self.norm2(self.conv2(y)))


class Convolutional(nn.Module):
    """A small residual network for images; ``groups`` = 0 means batch norm."""

    def __init__(self, groups: int, channels: int = 8, depth: int = 2) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, stride=2, padding=1)
        self.blocks = nn.Sequential(*(Residual(channels, groups) for _ in range(depth)))
        self.head = nn.Linear(channels, 8)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.stem(images)), 2)
        x = F.adaptive_avg_pool2d(self.blocks(x), 1).flatten(1)
        return F.cross_entropy(self.head(x), labels)


def cnn(batch: int = BATCH, groups: int = 0, dtype: torch.dtype = torch.float64) -> Example:
    """Build a residual network with batch norm."""
    module = _seeded(Convolutional, groups, dtype=dtype)
    return module, {
        "images": _floats(batch, 3, 16, 16, dtype=dtype),
        "labels": _tokens(batch, high=8),
    }


def cnn_groupnorm(batch: int = BATCH, dtype: torch.dtype = torch.float64) -> Example:
    """Build a residual network whose normalisation does not mix samples."""
    return cnn(batch, 4, dtype)


class Inception(nn.Module):
    """A stem, two branches of different depth whose channels are joined, and a head."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.left = nn.Conv2d(channels, channels, 1)
        self.right = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU(), nn.Conv2d(channels, 4, 1)
        )
        self.head = nn.Linear(channels + 4, 8)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = F.relu(self.stem(images))
        x = torch.cat([self.left(x), self.right(x)], 1)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


class Windows(nn.Module):
    """Windows of every sort over images: strides, dilation, groups, pooling, enlarging, branches."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 7, 2, 3)
        self.norm = nn.BatchNorm2d(channels)
        self.wide = nn.Conv2d(channels, channels, 3, padding=2, dilation=2)
        self.deep = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
        self.left = nn.Conv2d(channels, channels, 1)
        self.right = nn.Conv2d(channels, 4, 5, padding=2)
        self.back = nn.ConvTranspose2d(channels + 4, channels, 2, 2)
        self.down = nn.Conv2d(channels, channels, 3, 2, 1)
        self.head = nn.Linear(channels, 8)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(images)))
        x = x + self.deep(F.relu(self.wide(x)))
        pooled = F.max_pool2d(x, 3, 1, 1) + F.avg_pool2d(x, 3, 1, 1, count_include_pad=False)
        x = torch.cat([self.left(x), self.right(pooled)], 1)
        x = self.back(F.avg_pool2d(F.max_pool2d(x, 2), 3, 1, 1))
        x = self.down(F.interpolate(F.gelu(x), scale_factor=2.0))
        return F.cross_entropy(self.head(F.adaptive_avg_pool2d(x, 1).flatten(1)), labels)


def windows(batch: int = BATCH, dtype: torch.dtype = torch.float64) -> Example:
    """Build it; images of 32 x 32."""
    module = _seeded(Windows, dtype=dtype)
    return module, {
        "images": _floats(batch, 3, 32, 32, dtype=dtype),
        "labels": _tokens(batch, high=8),
    }


class Segmentation(nn.Module):
    """A small U-Net: a class for every pixel."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.inner = nn.Conv2d(channels, 2 * channels, 3, padding=1)
        self.back = nn.ConvTranspose2d(2 * channels, channels, 2, 2)
        self.last = nn.Conv2d(2 * channels, 5, 3, padding=1)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = F.relu(self.first(images))
        y = self.back(F.relu(self.inner(F.max_pool2d(x, 2))))
        return F.cross_entropy(self.last(torch.cat([x, y], 1)), labels)


def segmentation(batch: int = BATCH, dtype: torch.dtype = torch.float64) -> Example:
    """Build it; images of 16 x 24."""
    module = _seeded(Segmentation, dtype=dtype)
    return module, {
        "images": _floats(batch, 3, 16, 24, dtype=dtype),
        "labels": _tokens(batch, 16, 24, high=5),
    }


def inception(batch: int = BATCH, dtype: torch.dtype = torch.float64) -> Example:
    """Build a network with branches that can run at the same time."""
    module = _seeded(Inception, dtype=dtype)
    return module, {
        "images": _floats(batch, 3, 8, 8, dtype=dtype),
        "labels": _tokens(batch, high=8),
    }


class Translator(nn.Module):
    """An LSTM encoder, an LSTM decoder that starts from its state, and a projection."""

    def __init__(self, width: int = 16, depth: int = 2) -> None:
        super().__init__()
        self.source_embed = nn.Embedding(VOCABULARY, width)
        self.target_embed = nn.Embedding(VOCABULARY, width)
        self.encoder = nn.LSTM(width, width, depth, batch_first=True)
        self.decoder = nn.LSTM(width, width, depth, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        _, state = self.encoder(self.source_embed(source))
        decoded, _ = self.decoder(self.target_embed(target), state)
        return F.cross_entropy(self.head(decoded).flatten(0, 1), labels.flatten())


def lstm_translation(
    batch: int = BATCH, length: int = 6, dtype: torch.dtype = torch.float64
) -> Example:
    """Build a sequence-to-sequence translation model."""
    module = _seeded(Translator, dtype=dtype)
    return module, {
        "source": _tokens(batch, length + 2),
        "target": _tokens(batch, length, seed=2),
        "labels": _tokens(batch, length, seed=3),
    }


def _hugging_face(model: str, config: object, dtype: torch.dtype) -> nn.Module:
    import transformers

    config.use_cache = False
    return _seeded(getattr(transformers, model), config, dtype=dtype)


def llama(batch: int = BATCH, length: int = 16, dtype: torch.dtype = torch.float64) -> Example:
    """Build Hugging Face's Llama with grouped queries (4 heads on 2 key-value heads)."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    tokens = _tokens(batch, length)
    return _hugging_face("LlamaForCausalLM", config, dtype), {"input_ids": tokens, "labels": tokens}


def gpt2(batch: int = BATCH, length: int = 16, dtype: torch.dtype = torch.float64) -> Example:
    """Build Hugging Face's GPT-2: fused projections, tied head."""
    from transformers import GPT2Config

    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=32,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    tokens = _tokens(batch, length)
    return _hugging_face("GPT2LMHeadModel", config, dtype), {"input_ids": tokens, "labels": tokens}


def hf_bert(batch: int = BATCH, length: int = 16, dtype: torch.dtype = torch.float64) -> Example:
    """Build Hugging Face's BERT for masked language modelling."""
    from transformers import BertConfig

    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, max_position_embeddings=32, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    batch_ = {"input_ids": _tokens(batch, length), "labels": _tokens(batch, length, seed=2)}
    return _hugging_face("BertForMaskedLM", config, dtype), batch_


def t5(batch: int = BATCH, length: int = 16, dtype: torch.dtype = torch.float64) -> Example:
    """Build Hugging Face's T5 (encoder and decoder, relative positions, tied embeddings)."""
    from transformers import T5Config

    config = T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
        dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    batch_ = {"input_ids": _tokens(batch, length), "labels": _tokens(batch, length // 2, seed=2)}
    return _hugging_face("T5ForConditionalGeneration", config, dtype), batch_


def vit(batch: int = BATCH, dtype: torch.dtype = torch.float64) -> Example:
    """Build Hugging Face's vision transformer."""
    from transformers import ViTConfig

    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, image_size=16, patch_size=4,
        num_labels=8,
    )  # fmt: skip
    images = _floats(batch, 3, 16, 16, dtype=dtype)
    batch_ = {"pixel_values": images, "labels": _tokens(batch, high=8)}
    return _hugging_face("ViTForImageClassification", config, dtype), batch_


def resnet(batch: int = BATCH, dtype: torch.dtype = torch.float64) -> Example:
    """Build Hugging Face's ResNet with bottleneck blocks and batch norm, shrunk."""
    from transformers import ResNetConfig

    config = ResNetConfig(
        embedding_size=8,
        hidden_sizes=[16, 32],
        depths=[2, 1],
        layer_type="bottleneck",
        num_labels=8,
    )
    images = _floats(batch, 3, 32, 32, dtype=dtype)
    batch_ = {"pixel_values": images, "labels": _tokens(batch, high=8)}
    return _hugging_face("ResNetForImageClassification", config, dtype), batch_


def mixtral(batch: int = BATCH, length: int = 16, dtype: torch.dtype = torch.float64) -> Example:
    """Build Hugging Face's Mixtral: 4 experts, 2 per token."""
    from transformers import MixtralConfig

    config = MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
        max_position_embeddings=64, experts_implementation="batched_mm",
    )  # fmt: skip
    tokens = _tokens(batch, length)
    return _hugging_face("MixtralForCausalLM", config, dtype), {
        "input_ids": tokens,
        "labels": tokens,
    }
