"""Module-level capture for what cannot be exported: opaque operators that call a module.

An opaque operator is a module run as a pure function of its input tensors, parameters and buffers.
It has no rule, so it runs whole wherever it runs; the rest of the model stays in the graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

_library = torch.library.Library("shardwright", "FRAGMENT")
_library.define("opaque(Tensor[] tensors, str key) -> Tensor[]")

