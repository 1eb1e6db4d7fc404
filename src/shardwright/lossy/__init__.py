"""Gradients over networks that may lose packets, up to a bound: DLCP's transport, alone and for plain DDP.

``register`` makes a DistributedDataParallel use it; ``join`` and ``Sums`` sum arrays without one.
``python -m shardwright.lossy`` tells a Linux switch to heed their labels. Torch is imported only where
it is needed.
"""

from typing import TYPE_CHECKING, Any

from shardwright.lossy.calibration import Calibration, calibrate
from shardwright.lossy.collectives import Parts, Sums
from shardwright.lossy.settings import Tolerance, Transport
from shardwright.lossy.udp import UdpRank, seeded_dropper

if TYPE_CHECKING:
    from shardwright.lossy.hook import Lossy, join, own_address, register

__all__ = [
    "Calibration", "Lossy", "Parts", "Sums", "Tolerance", "Transport", "UdpRank", "calibrate", "join",
    "own_address", "register", "seeded_dropper",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from shardwright.lossy import hook

    return getattr(hook, name)
