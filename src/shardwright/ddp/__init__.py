"""Gradient communication for any user of torch's DistributedDataParallel: no plan, no capture.

``hooks.register`` compresses gradients on the wire.
"""

from shardwright.ddp import hooks
from shardwright.ddp.hooks import Compression, Compressor

__all__ = ["Compression", "Compressor", "hooks"]
