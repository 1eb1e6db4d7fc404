"""Capture: from an unmodified module and one batch to an operator graph that can be executed.

The graph is global: shapes are those of the whole batch, and nothing here knows about devices.
"""

from shardwright.runtime.capture.assemble import Captured, CapturedCall
from shardwright.runtime.capture.export import capture
from shardwright.runtime.capture.fused import seen_as
from shardwright.runtime.capture.models import load_model
from shardwright.runtime.capture.record import Slot

__all__ = ["Captured", "CapturedCall", "Slot", "capture", "load_model", "seen_as"]
