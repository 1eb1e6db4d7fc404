"""A small segment as the interpreter enters it, for what is measured between segments of a step."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.nn import functional as F

from shardwright.runtime.engine import edge_of, run_backward
from shardwright.runtime.saved_tensors import look_up_saved, stand_in


class Segment:
    """A layer, entering a graph, and entering the autograd engine for it: each by itself."""

    def __init__(self) -> None:
        self._x, self._weight = torch.rand(32, 256), torch.rand(256, 256)
        graph = torch.fx.Graph()
        node = graph.placeholder("x")
        graph.output((graph.call_function(torch.ops.aten.view.default, (node, [8])),))
        self._run = torch.fx.GraphModule({}, graph).forward
        self._held, self._seed = torch.rand(8), torch.rand(8)
        self._data: list[Tensor | None] = [self._held, None]
        self._entered: list[tuple[list[GradientEdge], list[Tensor]]] = []

    def layer(self) -> None:
        """Compute."""
        F.gelu(F.linear(self._x, self._weight))

    def forward(self) -> None:
        """Enter the graph."""
        with torch.enable_grad(), look_up_saved(self._data, ()):
            leaf, made = stand_in(self._held)
            outputs = self._run(made)
            edges = [edge for edge in map(edge_of, outputs) if edge is not None]
        self._data[1] = outputs[0].detach()
        self._entered.append((edges, [leaf]))

    def backward(self) -> None:
        """Enter the engine, for the last forward that it was not entered for."""
        edges, leaves = self._entered.pop()
        run_backward(edges, [self._seed], leaves)

    def forget(self) -> None:
        """Let go of what backward has not come to."""
        self._entered.clear()
