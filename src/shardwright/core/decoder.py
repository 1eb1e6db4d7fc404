"""The dimensions of a decoder, as published runs print them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """A transformer that predicts the next token.

    ``gated``: the feed-forward layer has a gate beside its first product (swiglu); ``activation`` is
    silu, gelu or relu2. ``rotary``: positions turn queries and keys; ``positions``: they are embedded;
    neither: they are part of attention (ALiBi). ``flash``: attention is one kernel. ``fused``: so is
    turning by positions. ``dropout``: the share dropped of scores, and before each residual sum.
    ``loss``: the kernel of cross entropy, see ``operators.keeping.kept``; "" is this runtime's.
    ``qk_norm``: queries and keys are normalised head by head. ``stepwise``: RMS norms run operator by operator, in float32. ``grouped``: what experts' products are
    made by, see ``planner.cost.kernels``; ``sorts``: tokens are put back in order by a kernel of its own.
    ``apart``: queries, keys, values, gates and what they gate are a product each.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    vocab: int
    seq: int
    activation: str = "gelu"
    gated: bool = False
    rms: bool = False
    bias: bool = False
    rotary: bool = False
    positions: bool = False
    tied: bool = False
    flash: bool = True
    fused: bool = True
    experts: int = 0
    topk: int = 0
    shared: int = 0
    adapters: int = 0
    dropout: float = 0.0
    loss: str = ""
    qk_norm: bool = False
    stepwise: bool = False
    grouped: str = "cutlass"
    sorts: bool = False
    apart: bool = False

    @property
    def num_parameters(self) -> int:
        """Elements of all weights, tied ones once, without norms, biases, routers and adapters."""
        return self._weights(max(self.experts, 1))

    @property
    def num_active(self) -> int:
        """Elements of the weights that one token meets."""
        return self._weights(self.topk if self.experts else 1)

    def _weights(self, experts: int) -> int:
        tables = self.vocab * (1 if self.tied else 2) + (self.seq if self.positions else 0)
        attention = 2 * self.head_size * (self.heads + self.kv_heads)
        forward = (3 if self.gated else 2) * (experts * self.ffn + self.shared)
        return self.hidden * (self.layers * (attention + forward) + tables)
