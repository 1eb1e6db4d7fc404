"""Gradients taken inside forward (forces, penalties, inner steps), written out as operators.

An exported graph holds the values of such a gradient, not how they depend on parameters. So a module in
which all of a gradient is known is traced below autograd instead: forward and the backward it asks for are
operators there like others, which autograd differentiates once more. What autograd knows and operators do
not say is noted beside: which of them ran without gradients.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.runtime.capture.gradients import check_engine_call, engine_calls
from shardwright.runtime.capture.hooks import Stub, inner_stub
from shardwright.runtime.capture.record import Unsupported, aten
from shardwright.runtime.capture.transforms import PLAIN, anew

_OPAQUE = torch.ops.shardwright.opaque.default
_UNTRACKED = "without gradients"  # in a node's meta
# Where results of an operator are the factors of the matrix it is given, and their pivots.
_FACTORS = {
    aten._linalg_det.default: (1, 2),
    aten._linalg_slogdet.default: (2, 3),
    aten._linalg_solve_ex.default: (1, 2),
}


def inner_written_out(module: fx.GraphModule) -> fx.GraphModule:
    """Return an exported graph in which calls of modules that take gradients are what these compute."""
    if not any(_inner(node) for node in module.graph.nodes):
        return module
    graph, known, tracks = fx.Graph(), dict[fx.Node, Any](), True
    for node in module.graph.nodes:
        stub = _inner(node)
        if stub is not None:
            known[node] = _insert(graph, known, stub, node, tracks)
        elif node.target is operator.getitem and isinstance(known[node.args[0]], list):
            known[node] = known[node.args[0]][node.args[1]]
        else:
            known[node] = graph.node_copy(node, known.__getitem__)
            if node.target is torch._C._set_grad_enabled:
                tracks = bool(node.args[0])
    return fx.GraphModule(module, graph)


def _inner(node: fx.Node) -> Stub | None:
    """Return the stub behind a node, if its module takes gradients and is to be written out."""
    return inner_stub(str(node.args[1])) if node.target is _OPAQUE else None


def _insert(
    graph: fx.Graph, known: dict[fx.Node, Any], stub: Stub, place: fx.Node, tracks: bool
) -> list[Any]:
    """Add the operators of a call to a graph; returns its results."""
    given: Any = place.args[0]
    traced = _traced(stub, [node.meta["val"] for node in given])
    *nodes, output = traced.graph.nodes
    here = dict(zip(nodes, map(known.__getitem__, given), strict=False))  # placeholders come first
    now = tracks
    for node in nodes[len(given) :]:
        wanted = tracks and not node.meta.get(_UNTRACKED, False)
        if node.op == "get_attr":
            here[node] = _constant(graph, getattr(traced, node.target))
        elif node.target is aten.detach.default and wanted:
            here[node] = here[node.args[0]]  # autograd's own: how it keeps what backward needs
        else:
            now = _border(graph, now, wanted)
            here[node] = graph.node_copy(node, here.__getitem__)
            here[node].target = anew(node.target)
            here[node].meta["nn_module_stack"] = place.meta.get("nn_module_stack")
    _border(graph, now, tracks)
    results = output.args[0]
    return [here[one] for one in (results if isinstance(results, (list, tuple)) else [results])]


def _border(graph: fx.Graph, now: bool, wanted: bool) -> bool:
    """Begin or end a region without gradients where one is to; returns what holds behind."""
    if wanted != now:
        graph.call_function(torch._C._set_grad_enabled, (wanted,))
    return wanted


def _constant(graph: fx.Graph, value: Any) -> fx.Node:
    if not isinstance(value, Tensor) or value.dim() or value.is_meta:
        raise Unsupported("a constant beside a gradient taken inside forward")
    return graph.call_function(aten.full.default, ([], value.item()), {"dtype": value.dtype})


def _traced(stub: Stub, given: Sequence[Tensor]) -> fx.GraphModule:
    """Return what a call computes, below autograd, with nodes marked that ran without gradients."""

    def run(*tensors: Tensor) -> Any:
        with _Marking(), _Detaching(), _forward(stub.call.module, stub.inner):
            return stub.call(list(tensors))

    def engine(_: Any, *args: Any, **options: Any) -> Any:
        check_engine_call(args, options)
        return torch.autograd.graph._engine_run_backward(*args, **options)

    def trace(place: contextlib.AbstractContextManager[Any]) -> fx.GraphModule:
        with place, engine_calls(engine), torch.enable_grad():
            return make_fx(run, decomposition_table=PLAIN)(*map(_empty, given))

    try:
        traced = trace(FakeTensorMode(allow_non_fake_inputs=True))
    except Exception:  # noqa: BLE001 - fake tensors know constants, and no derivatives forward
        traced = trace(torch.device("meta"))
    if any(node.target is _OPAQUE for node in traced.graph.nodes):
        raise Unsupported("a custom gradient beside a gradient taken inside forward")
    _factor_as_traced(traced.graph)
    traced.graph.eliminate_dead_code()
    return traced


def _factor_as_traced(graph: fx.Graph) -> None:
    """Factor matrices in operators of their own: determinants and solutions factor a matrix turned where its
    memory is contiguous, and a shard's or a message's is where it was not when backward was traced."""
    for node in [one for one in graph.nodes if one.target in _FACTORS]:
        places = _FACTORS[node.target]
        wanted = [one for one in node.users if one.args[1] in places]
        factors = _factors(graph, node) if wanted else None
        for one in wanted:
            one.args = (factors, places.index(one.args[1]))


def _factors(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Add the factors of the matrix that a node is given, turned as the node turns it."""
    matrix: Any = node.args[0]
    seen: Tensor = matrix.meta["val"]
    is_turned = seen.is_contiguous() and not seen.is_complex()
    with graph.inserting_before(node):
        turned = graph.call_function(aten.mT.default, (matrix,)) if is_turned else matrix
        factors = graph.call_function(aten.linalg_lu_factor_ex.default, (turned,))
    for one in {turned, factors} - {matrix}:
        one.meta = {key: value for key, value in node.meta.items() if key != "val"}
    return factors


def _empty(like: Tensor) -> Tensor:
    made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
    return made.requires_grad_(made.is_floating_point() or made.is_complex())


@contextlib.contextmanager
def _forward(module: nn.Module, forward: Any) -> Iterator[None]:
    """Let a module run a forward of its own instead of what capture has put in its place."""
    held = vars(module)["forward"]
    vars(module)["forward"] = forward
    try:
        yield
    finally:
        vars(module)["forward"] = held


class _Marking(TorchDispatchMode):
    """Marks the nodes that are traced while gradients are off."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        proxies = get_proxy_mode()
        assert proxies is not None
        graph = proxies.tracer.graph  # pyright: ignore
        last = next(iter(reversed(graph.nodes)), None)
        result = func(*args, **(kwargs or {}))
        if not torch.is_grad_enabled():
            for node in reversed(graph.nodes):
                if node is last:
                    break
                node.meta[_UNTRACKED] = True
        return result


class _Detaching(TorchFunctionMode):
    """Lets the model's own detached tensors be told from those that autograd keeps for itself."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.detach, torch.detach):
            with torch.no_grad():
                return func(*args, **(kwargs or {}))
        if func is torch.Tensor.detach_:
            raise Unsupported("detach_ beside a gradient taken inside forward")
        return func(*args, **(kwargs or {}))
