"""Stalls: where a training step waits for its input."""

from shardwright.runtime.stalls.account import living
from shardwright.runtime.stalls.measure import Analysis

__all__ = ["Analysis", "living"]
