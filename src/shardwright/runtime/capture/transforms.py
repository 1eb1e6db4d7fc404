"""Transforms of ``torch.func`` inside forward (``vmap``, ``jvp``), written out as operators on whole batches.

An exported graph holds where a transform begins and ends, and between them operators of one sample. Such a
region is traced once more below the transforms: what is recorded there is what they made of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._decomp import get_decompositions
from torch._functorch import predispatch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta

from shardwright.runtime.capture.convolved import convolution_backward
from shardwright.runtime.capture.record import Unsupported, aten

_functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]

# Kernels that backward calls, and those that forward calls for its sake, in operators that have rules and
# derivatives of their own.
PLAIN: Any = get_decompositions(
    [
        aten.tanh_backward, aten.sigmoid_backward, aten.threshold_backward, aten.gelu_backward,
        aten.silu_backward, aten.softplus_backward, aten.elu_backward, aten.leaky_relu_backward,
        aten.hardtanh_backward, aten.hardswish_backward, aten.mish_backward, aten.log_sigmoid_backward,
        aten._softmax, aten._log_softmax, aten._softmax_backward_data, aten._log_softmax_backward_data,
        aten.native_layer_norm, aten.native_layer_norm_backward, aten.native_group_norm,
        aten.native_group_norm_backward, aten.mse_loss_backward, aten.smooth_l1_loss_backward,
        aten.huber_loss_backward, aten.binary_cross_entropy_backward,
        aten.nll_loss_forward, aten.nll_loss_backward, aten.embedding_dense_backward,
        aten.slice_backward, aten.select_backward, aten.unfold_backward, aten.diagonal_backward,
        aten.log_sigmoid_forward, aten.rsub, aten.addcmul, aten.addcdiv,
    ]
) | {aten.convolution_backward.default: convolution_backward}  # fmt: skip
# Below autograd nothing is left of these.
_LOST = (aten.detach.default, aten.detach_.default, torch._C._set_grad_enabled)


def written_out(module: fx.GraphModule) -> fx.GraphModule:
    """Return an exported graph without transforms; itself where it has none."""
    if not any(map(_step, module.graph.nodes)):
        return module
    graph, known = fx.Graph(), dict[fx.Node, Any]()
    for part in _parts(module.graph):
        if isinstance(part, fx.Node):
            known[part] = graph.node_copy(part, known.__getitem__)
        else:
            _insert(graph, known, module, part)
    return fx.GraphModule(module, graph)


@dataclass
class _Region:
    """The nodes from where the outermost transform begins to where it ends."""

    nodes: list[fx.Node] = field(default_factory=list[fx.Node])

    @property
    def given(self) -> list[fx.Node]:
        """What it reads from before."""
        inside = set(self.nodes)
        read = (one for node in self.nodes for one in node.all_input_nodes if one not in inside)
        return list(dict.fromkeys(read))

    @property
    def results(self) -> list[fx.Node]:
        """What is read of it behind."""
        inside = set(self.nodes)
        return [node for node in self.nodes if not inside.issuperset(node.users)]


def _step(node: fx.Node) -> int:
    """Return 1 where a transform begins, -1 where it ends, 0 elsewhere."""
    name = getattr(node.target, "__name__", "")
    if getattr(predispatch, name, None) is not node.target:
        return 0
    return name.endswith("_increment_nesting") - name.endswith("_decrement_nesting")


def _parts(graph: fx.Graph) -> Iterator[fx.Node | _Region]:
    """Yield nodes and regions in order, but not the loading of torch's own rules."""
    depth, region = 0, _Region()
    for node in graph.nodes:
        step = _step(node)
        depth += step
        if depth or step:
            region.nodes.append(node)
            if not depth:
                yield region
                region = _Region()
        elif node.target is not predispatch.lazy_load_decompositions:
            yield node


def _insert(
    graph: fx.Graph, known: dict[fx.Node, Any], module: fx.GraphModule, region: _Region
) -> None:
    """Add a region's operators to a graph."""
    for node in region.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.target in _LOST or (schema is not None and schema.is_mutable):
            raise Unsupported(f"{node.target} inside torch.func")
    given, results = region.given, region.results
    places = iter(given)
    for node in _traced(module, region.nodes, given, results).nodes:
        if node.op == "placeholder":
            known[node] = known[next(places)]
        elif node.op == "output":
            known.update(zip(results, map(known.__getitem__, node.args[0]), strict=True))
        elif node.op == "get_attr":
            raise Unsupported("a constant inside torch.func")
        else:
            known[node] = graph.node_copy(node, known.__getitem__)
            known[node].target = anew(node.target)


def anew(target: Any) -> Any:
    """Return the operator that looks at a tensor anew instead of changing what it looks at: traced nodes name
    what it is afterwards."""
    if torch.Tag.inplace_view not in getattr(target, "tags", ()):
        return target
    name = target._schema.name.split("::")[1]
    return getattr(getattr(aten, name.removesuffix("_")), target._overloadname)


def _traced(
    module: fx.GraphModule,
    nodes: Sequence[fx.Node],
    given: Sequence[fx.Node],
    results: Sequence[fx.Node],
) -> fx.Graph:
    """Return some nodes of a module as a graph of what runs below the transforms."""
    inner, known = fx.Graph(), dict[fx.Node, Any]()
    for node in given:
        known[node] = inner.placeholder(node.name)
    for node in nodes:
        known[node] = inner.node_copy(node, known.__getitem__)
    inner.output([known[node] for node in results])
    # All may ask for gradients: kernels that have none are not chosen.
    empty = [_empty(node.meta["val"]) for node in given]
    with preserve_node_meta(), torch.enable_grad(), _nothing_left():
        run = fx.Interpreter(fx.GraphModule(module, inner)).run
        traced = make_fx(run, decomposition_table=PLAIN)(*empty)
    traced.graph.eliminate_dead_code()
    return traced.graph


@contextlib.contextmanager
def _nothing_left() -> Iterator[None]:
    """End the transforms that an error has interrupted, which all that follows would otherwise run inside of."""
    begun = _num_transforms()
    try:
        yield
    except BaseException:
        while _num_transforms() > begun:
            _functorch.pop_dynamic_layer_stack()
        raise


def _num_transforms() -> int:
    return len(_functorch.get_interpreter_stack() or ())


def _empty(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    # On the device that operators between them may name.
    with getattr(value, "fake_mode", None) or contextlib.nullcontext():
        made = torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=value.device
        )
    return made.requires_grad_(made.is_floating_point() or made.is_complex())
