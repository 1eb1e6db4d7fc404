"""Caching loaders for any user of torch's DataLoader: no plan, no capture, and no torch in here.

``MinIOCache`` keeps raw bytes that never leave again, ``PartitionedCache`` those of several hosts; files, tar shards
and token files are read through either. ``SharedLoader`` prepares samples once for several jobs of one host.
"""

from shardwright.caching.coordinated import SharedLoader, Sharing
from shardwright.caching.datasets import CachedFiles, CachedShards, CachedTokens
from shardwright.caching.minio import CacheState, MinIOCache
from shardwright.caching.partitioned import PartitionedCache
from shardwright.caching.server import CacheServer

__all__ = [
    "CacheServer",
    "CacheState",
    "CachedFiles",
    "CachedShards",
    "CachedTokens",
    "MinIOCache",
    "PartitionedCache",
    "SharedLoader",
    "Sharing",
]
