"""What software makes of a GPU's kernels: the few constants that depend on it, by profile.

A profile is a named fact about the cluster (``Cluster.software``): which kernels run, and whether
chains of element-wise operators are one kernel. The tables of ``kernels`` hold what bare kernels
reach on an idle device; a training step reaches a share of that, since clocks fall under load,
backward products have other layouts, and collectives run beside them.

``eager-2023``: PyTorch 2.0 without compilation, FlashAttention-2. ``eager``: PyTorch of 2024 on.
``compiled``: ``torch.compile`` or the like, chains of element-wise operators fused;
``compiled-async`` sends what tensor parallelism must beneath the products beside it. ``megatron``:
Megatron-LM and its kin: fused norms, rotary embedding and activations, host time hidden.
``megatron-core``: the same over Transformer Engine (Megatron-Core, NeMo), of 2023 on.
``internevo``: kernels of ``megatron``; every parameter and gradient is sent by itself.

Fitted by ``benchmarks/gpu_fit.py`` to published runs, leaving out one source at a time; docs/concepts/cost.md
holds the residuals. Half-widths are their spread.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwright.core.program import Message
from shardwright.operators.counting.rounding import Rounding

# The share of the peak that products reach in a running step however well they fit, by a part of the
# device's name. The power limit sets it: alone, one product runs at clocks that a step cannot hold.
SUSTAINED = (
    ("500W", 0.50), ("H100", 0.62), ("H200", 0.62), ("H800", 0.62), ("B200", 0.62), ("B300", 0.62),
    ("A100", 0.77), ("V100", 0.60),
)  # fmt: skip
USUALLY_SUSTAINED = 0.7
# How sharp the limit is: the power mean of both rates, falling to the smaller as this grows.
SHARPNESS = 4
# Devices whose attention kernels were written before them run at less than they could.
EARLIER = ("A100", "V100")


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """The constants of one profile.

    ``attention`` is the share of measured attention on A100 and before, ``attention_later`` on
    devices after it;
    ``attention_backward`` the rate of backward attention over that of forward. ``memory`` is the
    share of the memory's bandwidth that element-wise kernels reach; with ``is_fused`` chains of them
    are one kernel, save those named in ``apart`` (softmax with scale and mask, fused by hand, is not
    fused with the dropout behind it); ``host`` is what the host
    takes to start one operator, ``gap`` what lies between two kernels on the device, both as shares
    of the device's ``launch_seconds``;
    ``collective`` the share of the measured NCCL rate that is left beside computation.
    ``rounding`` says how operands of 8-bit products get there, see ``rounding``. With
    ``adds_in_products`` a weight's gradient is added to that of earlier microbatches by the product
    that makes it. With ``overlaps_products`` what a product reads is gathered, and what it makes
    scattered, piece by piece while it runs. With ``balances_attention`` devices that share a sequence
    have an early and a late part of it each (Megatron's and torchtitan's context parallelism).
    With ``owns_whole`` ZeRO gives each parameter to one device, which sends it, and is sent its
    gradient, apart from all others; else those of a layer travel together.
    ``spread`` is a half-width as a share.
    """

    attention: float = 0.72
    attention_later: float = 0.55
    attention_backward: float = 0.75
    memory: float = 0.8
    is_fused: bool = False
    apart: frozenset[str] = frozenset()
    host: float = 1.2
    gap: float = 0.3
    collective: float = 0.95
    rounding: Rounding = "plain"
    adds_in_products: bool = False
    overlaps_products: bool = False
    balances_attention: bool = False
    owns_whole: bool = False
    spread: float = 0.15

    def num_messages(self, message: Message) -> int:
        """Return as how many messages the tensors of one are sent."""
        is_apart = self.owns_whole and message.purpose in ("parameter", "synchronise")
        return len(message.sources) if is_apart else 1

    def attention_share(self, device: str) -> float:
        """Return what forward attention keeps of its rate alone on a device (its name)."""
        is_early = any(part in device for part in EARLIER)
        return self.attention if is_early else self.attention_later


def sustained(rate: float, peak: float, device: str) -> float:
    """Return the flop/s that a product keeps in a step, of what it reaches alone on a device."""
    found = (share for part, share in SUSTAINED if part in device)
    limit = peak * next(found, USUALLY_SUSTAINED)
    return (rate**-SHARPNESS + limit**-SHARPNESS) ** (-1 / SHARPNESS)


_COMPILED = Software(is_fused=True, host=0.6, rounding="fused")
_MEGATRON = Software(
    attention_later=0.8,
    is_fused=True,
    apart=frozenset({"softmax", "_softmax"}),
    host=0.8,
    rounding="transposing",
    balances_attention=True,
)
PROFILES = {
    "eager-2023": Software(attention_later=0.34),
    "eager": Software(memory=0.55),
    "compiled": _COMPILED,
    "compiled-async": replace(_COMPILED, overlaps_products=True),
    "megatron": _MEGATRON,
    "megatron-core": replace(_MEGATRON, adds_in_products=True, overlaps_products=True),
    "internevo": replace(_MEGATRON, owns_whole=True),
}
