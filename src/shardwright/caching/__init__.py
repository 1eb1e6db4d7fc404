"""Caching loaders for any user of torch's DataLoader: no plan, no capture, and no torch in here.

``MinIOCache`` keeps raw bytes that never leave again; files, tar shards and token files are read through it.
"""

from shardwright.caching.datasets import CachedFiles, CachedShards, CachedTokens
from shardwright.caching.minio import CacheState, MinIOCache

__all__ = ["CacheState", "CachedFiles", "CachedShards", "CachedTokens", "MinIOCache"]
