"""In which precision a model is planned, and captured."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardwright.core.cluster import Cluster
from shardwright.core.float8 import FLOAT8
from shardwright.errors import InputError, PrecisionError
from shardwright.verbs.request import Request
from shardwright.verbs.subject import Batch, captured_for

if TYPE_CHECKING:
    from torch import nn

    from shardwright.runtime.capture import Captured


def captured_on(
    cluster: Cluster, model: str | nn.Module, request: Request, batch: Batch | None = None
) -> tuple[Captured, Request, tuple[str, ...]]:
    """Capture a model in the precision to plan in on a cluster; return the request for that, and why ``auto`` is
    not what its devices are fastest in."""
    asked = replace(request, precision=possible_precision(cluster, request.precision))
    try:
        return captured_for(model, asked, batch), asked, ()
    except PrecisionError as error:
        if request.precision != "auto":
            raise
        exact = replace(asked, precision="float32")
        note = f"planned in float32, not in {asked.precision}: {error}"
        return captured_for(model, exact, batch), exact, (note,)


def possible_precision(cluster: Cluster, wanted: str) -> str:
    """Return the precision to plan in: the natural one for ``auto``.

    Raises InputError for 8-bit products where some device cannot multiply so. A CPU can, slowly.
    """
    if wanted == "auto":
        return natural_precision(cluster)
    for kind in cluster.kinds if wanted in FLOAT8 else ():
        if kind.backend != "cpu" and "float8" not in dict(kind.peak_flops):
            rates = ", ".join(name for name, _ in kind.peak_flops)
            raise InputError(
                f"fp8 products need devices with a rate for float8, but {kind.name} has rates for "
                f"{rates} only; choose --precision bfloat16, or name the rate in a cluster file"
            )
    return wanted


def natural_precision(cluster: Cluster) -> str:
    """Return bfloat16 where every device is faster in it than in float32, else float32."""
    rates = [dict(cluster.kind_of(device).peak_flops) for device in range(cluster.num_devices)]
    is_faster = all(rate.get("bfloat16", 0.0) > rate.get("float32", 0.0) for rate in rates)
    return "bfloat16" if is_faster else "float32"
