"""What a training iteration is made of, layer by layer, and what is predicted of it on several workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Exchange = Literal["naive", "wait-free", "merged", "mg-wfbp", "top-k", "gtop-k"]
Binding = Literal["input", "computation", "network"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedLayer:
    """Seconds of one layer on one worker, nothing communicated meanwhile, and the bytes of its gradients."""

    name: str
    forward_seconds: float
    backward_seconds: float
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTrace:
    """Layers in the order of forward; seconds of reading a batch, of copying it to the device, of the update."""

    name: str
    layers: tuple[TracedLayer, ...]
    fetch_seconds: float = 0.0
    copy_seconds: float = 0.0
    update_seconds: float = 0.0

    @property
    def bytes(self) -> int:
        """Of all gradients."""
        return sum(layer.bytes for layer in self.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """One iteration of synchronous SGD on so many workers, from one to the next once that repeats.

    ``network_seconds`` all messages take, of which ``exposed_seconds`` pass after backward;
    ``select_seconds`` are those of choosing what is sent. ``single_seconds``: the iteration of one worker,
    which sends nothing. ``messages`` are the layers that travel together, the first sent first.
    """

    exchange: Exchange
    workers: int
    seconds: float
    compute_seconds: float
    select_seconds: float
    input_seconds: float
    network_seconds: float
    exposed_seconds: float
    single_seconds: float
    messages: tuple[tuple[int, ...], ...]

    @property
    def speedup(self) -> float:
        """Samples per second over those of one worker, each with a batch of the same size."""
        return self.workers * self.single_seconds / self.seconds if self.seconds else 0.0

    @property
    def efficiency(self) -> float:
        """Its share of the workers' number."""
        return self.speedup / self.workers

    @property
    def binding(self) -> Binding:
        """What the iteration would be shorter without: the resource that is busy longest."""
        busy: dict[Binding, float] = {
            "computation": self.compute_seconds + self.select_seconds,
            "network": self.network_seconds,
            "input": self.input_seconds,
        }
        return max(busy, key=lambda name: busy[name])
