"""Measure this machine: its devices, operator shards, collectives, and the overheads of running.

Measures what it is asked for and returns records; what to ask, and what to make of the answer, is
decided elsewhere.
"""

from shardwright.runtime.profile.collectives import Probe, measure_collectives
from shardwright.runtime.profile.machine import (
    METHOD,
    RATES,
    detect,
    local_backend,
    local_environment,
    measure_machine,
    num_local_devices,
)
from shardwright.runtime.profile.operators import Setting, measure_operators
from shardwright.runtime.profile.shards import Wanted

__all__ = [
    "METHOD", "RATES", "Probe", "Setting", "Wanted", "detect", "local_backend", "local_environment",
    "measure_collectives", "measure_machine", "measure_operators", "num_local_devices",
]  # fmt: skip
