"""What torch does for every node of an exported graph and nobody here reads, left out while one is made.

Together a third of what exporting a deep model takes. The graph is the same without.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch.export._trace as tracing
from torch._export.utils import _get_shape_env_from_gm
from torch.fx import GraphModule, config
from torch.fx.experimental import proxy_tensor
from torch.utils._sympy.symbol import SymT, symbol_is_type


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Let Python not look for garbage in cycles: a capture makes objects that stay, all of which it would go
    through again and again, an eighth of one of 250 layers; there is little garbage."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def frugal() -> Iterator[None]:
    """Export with all of what follows left out."""
    with contextlib.ExitStack() as stack:
        for leave_out in (_stack_traces, _code, _copies_of_shapes, _bindings):
            stack.enter_context(leave_out())
        yield


@contextlib.contextmanager
def _stack_traces() -> Iterator[None]:
    """Of every operator, which lines called it: an eighth of a capture."""
    before, config.do_not_emit_stack_traces = config.do_not_emit_stack_traces, True
    try:
        yield
    finally:
        config.do_not_emit_stack_traces = before


@contextlib.contextmanager
def _code() -> Iterator[None]:
    """Python code of graphs, written and compiled after each of four passes: it is made where one is run, such as
    the body of a loop."""
    compiled = GraphModule.recompile

    def later(graph: GraphModule) -> None:
        def forward(graph: GraphModule, *args: Any, **kwargs: Any) -> Any:
            compiled(graph)
            return graph(*args, **kwargs)

        type(graph).forward = forward  # type: ignore[method-assign] - every graph has a class of its own

    GraphModule.recompile = later  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        GraphModule.recompile = compiled  # type: ignore[method-assign]


@contextlib.contextmanager
def _copies_of_shapes() -> Iterator[None]:
    """Shape, strides and dtype of every result beside the result itself (``tensor_meta`` beside ``val``)."""
    extract = proxy_tensor._extract_tensor_metadata
    proxy_tensor._extract_tensor_metadata = lambda *_, **__: None  # type: ignore[assignment]
    try:
        yield
    finally:
        proxy_tensor._extract_tensor_metadata = extract


@contextlib.contextmanager
def _bindings() -> Iterator[None]:
    """Searching every result for sizes that depend on values, where there are none."""
    search = tracing._replace_unbacked_bindings

    def searched(graph: GraphModule) -> None:
        found = _get_shape_env_from_gm(graph)
        sizes = () if found is None else found.var_to_range
        if any(symbol_is_type(one, (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT)) for one in sizes):
            search(graph)
            return
        for node in graph.graph.nodes:
            node.meta.pop("unbacked_bindings", None)

    tracing._replace_unbacked_bindings = searched
    try:
        yield
    finally:
        tracing._replace_unbacked_bindings = search
