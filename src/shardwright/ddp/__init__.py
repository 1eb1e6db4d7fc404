"""Gradient communication for any user of torch's DistributedDataParallel: no plan, no capture.

``wrap`` chooses buckets by measuring; ``hooks.register`` compresses gradients on the wire.
"""

from shardwright.ddp import hooks
from shardwright.ddp.buckets import BucketChoice, BucketPlan, choose_buckets, plan_buckets, wrap
from shardwright.ddp.hooks import Compression, Compressor

__all__ = [
    "BucketChoice", "BucketPlan", "Compression", "Compressor", "choose_buckets", "hooks",
    "plan_buckets", "wrap",
]  # fmt: skip
