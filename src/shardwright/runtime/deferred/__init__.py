"""Deferred building: a module's structure now, its parameters later and one at a time.

The numbers are those of a plain build under the same seed, bit for bit.
"""

from shardwright.runtime.deferred.build import (
    Built,
    Deferred,
    build_deferred,
    built_from,
    copy_deferred,
    deferred_of,
    replace_parameters,
)

__all__ = [
    "Built", "Deferred", "build_deferred", "built_from", "copy_deferred", "deferred_of",
    "replace_parameters",
]  # fmt: skip
