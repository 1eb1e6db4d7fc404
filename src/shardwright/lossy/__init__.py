"""Gradients over networks that may lose packets, up to a bound: DLCP's transport, alone and for plain DDP.

``register`` makes a DistributedDataParallel use it; ``join`` and ``Sums`` sum arrays without one.
"""

from shardwright.lossy.collectives import Parts, Sums
from shardwright.lossy.hook import Lossy, join, own_address, register
from shardwright.lossy.settings import Tolerance, Transport
from shardwright.lossy.udp import UdpRank, seeded_dropper

__all__ = [
    "Lossy", "Parts", "Sums", "Tolerance", "Transport", "UdpRank", "join", "own_address",
    "register", "seeded_dropper",
]  # fmt: skip
