"""What software makes of a GPU's kernels: the few constants that depend on it, by profile.

A profile is a named fact about the cluster (``Cluster.software``): which kernels run, and whether
chains of element-wise operators are one kernel. The tables of ``kernels`` hold what bare kernels
reach on an idle device; a training step reaches a share of that, since clocks fall under load,
backward products have other layouts, and collectives run beside them.

``eager-2023``: PyTorch 2.0 without compilation, FlashAttention-2. ``eager``: PyTorch of 2024 on.
``compiled``: ``torch.compile`` or the like, chains of element-wise operators fused. ``megatron``:
Megatron-LM, NeMo and their kin: fused norms, rotary embedding and activations, host time hidden.

Fitted by ``benchmarks/gpu_fit.py`` to published runs, leaving out one source at a time; docs/concepts/cost.md
holds the residuals. Half-widths are their spread.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """The constants of one profile.

    ``product`` and ``attention`` are shares of the measured bare kernel; ``attention_backward`` the
    rate of backward attention over that of forward; ``memory`` the share of the memory's bandwidth
    that element-wise kernels reach; ``host_seconds`` what the host takes to start one operator,
    ``gap_seconds`` what lies between two kernels on the device; ``collective`` the share of the
    measured NCCL rate that is left beside computation. ``spread`` is a half-width as a share.
    """

    product: float
    attention: float
    attention_backward: float = 0.75
    memory: float = 0.8
    is_fused: bool = False
    host_seconds: float = 6e-6
    gap_seconds: float = 1.5e-6
    collective: float = 0.8
    spread: float = 0.15


PROFILES = {
    "eager-2023": Software(product=0.8, attention=0.6),
    "eager": Software(product=0.85, attention=0.9),
    "compiled": Software(product=0.85, attention=0.9, is_fused=True, host_seconds=3e-6),
    "megatron": Software(product=0.85, attention=0.9, is_fused=True, host_seconds=4e-6),
}
