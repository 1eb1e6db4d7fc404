"""Build the local computation of one segment: a ``torch.fx`` graph on shards.

Placeholders are the segment's input values, outputs its output values. What shards change about an
operator is written into the graph here (shapes, biases counted once, scaled means, offsets of a
vocabulary shard, seeds of random operators), so that running it is plain PyTorch without dispatch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from shardwright.core.float8 import FLOAT8, is_float8_product
from shardwright.core.graph import Operator, OperatorGraph
from shardwright.core.program import Call, Program, Segment, Value
from shardwright.core.strategy import Mesh
from shardwright.core.vocabulary import BLOCKS, LOG_SUMS, LOSS, is_whole
from shardwright.errors import RunError
from shardwright.runtime import attention
from shardwright.runtime.capture import Captured, CapturedCall, Slot
from shardwright.runtime.capture.hooks import Opaque
from shardwright.runtime.capture.vocabulary import whole_cross_entropy_sum
from shardwright.runtime.deferral import Aside, Product, run_split
from shardwright.runtime.float8 import SCALED
from shardwright.runtime.halos import average_inside
from shardwright.runtime.localise import localise
from shardwright.runtime.offsets import with_offset
from shardwright.runtime.randomness import (
    RandomSource,
    is_random,
    place_seed,
    python_seeded,
    reseed,
)

# Arguments that tell an operator it is training, and what they are when it is not.
INFERENCE = {"train": False, "training": False, "dropout_p": 0.0, "dropout": 0.0}
# Arguments with which batch norm leaves its running statistics as they are.
UNTOUCHED = {"momentum": 0.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where a rank stands: its mesh, its coordinate on it, its torch device and random numbers."""

    mesh: Mesh
    coordinate: tuple[int, ...]
    device: torch.device
    source: RandomSource


@dataclass(frozen=True, slots=True)
class Mode:
    """Which variant of a segment: ``training`` or evaluation; ``writes`` buffers (batch statistics)
    or leaves them alone, as recomputation must. ``statistics`` are running values (one per channel)
    to be used in place of the tensors they are of. ``aside``: backward is to run in two halves, and what the first leaves goes there."""

    training: bool = True
    writes: bool = True
    statistics: Mapping[int, Tensor] = field(default_factory=dict[int, Tensor])
    aside: Aside | None = None


def shard_offset(value: Value, dim: int, site: Site) -> int:
    """Return where this device's shard of a value begins along a dim."""
    place = 0
    for placement, size, mine in zip(value.layout, site.mesh.sizes, site.coordinate, strict=True):
        if placement == dim:
            place = place * size + mine
    return place * value.shape[dim]


def build_segment(
    captured: Captured, program: Program, segment: Segment, site: Site, mode: Mode
) -> fx.GraphModule:
    """Return the graph module of a segment as the device at ``site`` runs it."""
    return _Builder(captured, program, site, mode).build(segment)


def running_statistics(captured: Captured) -> dict[int, int]:
    """Map the tensors that hold statistics of the batch to the buffers of their running values."""
    found: dict[int, int] = {}
    for operator in captured.graph.operators:
        if operator.kind == "shardwright.update_running":
            names = dict(zip(operator.input_names, operator.inputs, strict=True))
            found[names["mean"]] = names["running_mean"]
            found[names["variance"]] = names["running_var"]
    return found


def writes_buffers(captured: Captured, segment: Segment) -> bool:
    """Whether some operator of the segment changes a buffer in place."""
    operators = [captured.graph.operators[call.operator] for call in segment.calls]
    return any(
        not op.outputs or op.kind.startswith(("aten.batch_norm", "opaque.")) for op in operators
    )


def _read_detached(graph: OperatorGraph, operator: Operator) -> list[int]:
    """Return which operands autograd is not to look behind, since no gradient of the loss reaches what is made of them: else
    it would keep what it needs for one until a later operator is read detached."""
    made = [graph.tensors[tensor] for tensor in operator.outputs]
    is_seen = operator.kind.startswith(("opaque.", "aten.detach"))
    if is_seen or any(one.needs_gradient or not one.is_floating for one in made):
        return []
    return [
        position
        for position, tensor in enumerate(operator.inputs)
        if made and graph.tensors[tensor].needs_gradient
    ]


class _Builder:
    """Writes the calls of one segment into one graph."""

    def __init__(self, captured: Captured, program: Program, site: Site, mode: Mode) -> None:
        self.captured = captured
        self.program = program
        self.site = site
        self.mode = mode
        self.graph = fx.Graph()
        self.nodes: dict[int, fx.Node] = {}
        self.randomness: fx.Node | None = None
        precision = program.strategy.precision
        self.float8 = precision if precision in FLOAT8 else ""
        self.held: dict[str, Any] = {"randomness": site.source}

    def build(self, segment: Segment) -> fx.GraphModule:
        for value in segment.inputs:
            self.nodes[value] = self.graph.placeholder(f"v{value}")
        for value in segment.inputs:
            self.nodes[value] = self._running(value) or self.nodes[value]
        deferred = segment.deferred if self.mode.aside is not None else ()
        self.place = dict(zip(segment.inputs, itertools.count(), strict=False))
        for number, call in enumerate(segment.calls):
            operator = self.captured.graph.operators[call.operator]
            if operator.outputs or (self.mode.writes and self.mode.training):
                self._call(call, operator, number in deferred)
        self.graph.output(tuple(self._node(value) for value in segment.outputs))
        self._leave_out_sums(segment)
        return fx.GraphModule(self.held, self.graph, "Segment")

    def _leave_out_sums(self, segment: Segment) -> None:
        """Do not make what the loss over a vocabulary does not read where the device has all of it."""
        for call in segment.calls:
            if self.captured.graph.operators[call.operator].kind == LOG_SUMS:
                node = self.nodes[call.results[0]]
                if not node.users:
                    self.graph.erase_node(node)

    def _node(self, value: int) -> fx.Node:
        while value not in self.nodes:
            value = self.program.values[value].alias
            if value < 0:
                raise RunError("a segment reads a value that is not among its inputs")
        return self.nodes[value]

    def _call(self, call: Call, operator: Operator, is_deferred: bool) -> None:
        recorded: CapturedCall = self.captured.calls[call.operator]
        args, kwargs = localise(
            recorded, operator, call.result_shapes, self.site.device, call.unpadded
        )
        silent = () if self._first_on(call.partial_axes) else call.once
        operands = self._operands(call, operator)
        given: list[Any] = []
        if is_deferred:
            given, operands = operands, list(map(Slot, range(len(operands))))
        else:
            for position in silent:
                operands[position] = self.graph.call_function(_silent, (operands[position],))
        args, kwargs = _fill(args, operands), {k: _fill(v, operands) for k, v in kwargs.items()}
        args, kwargs = self._in_mode(recorded.target, args, kwargs)
        if is_random(recorded.target, args, kwargs):
            self._reseed(call)
        target, more = self._kernel(call, operator, recorded.target)
        kwargs = {**kwargs, **more}
        if isinstance(target, Opaque):
            result = self._opaque(call, target, args[0])
        elif is_deferred and self.mode.aside is not None:
            run = partial(_run, target, args, kwargs, silent)
            result = self._split(call, given, run, self.mode.aside)
        else:
            result = self.graph.call_function(target, args, kwargs)
        self._keep(call, _returns_list(recorded.target), result)

    def _in_mode(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of an operator that knows whether it trains, in this mode."""
        if not self.mode.training:
            return with_settings(target, args, kwargs, INFERENCE)
        return (
            (args, kwargs) if self.mode.writes else with_settings(target, args, kwargs, UNTOUCHED)
        )

    def _kernel(self, call: Call, operator: Operator, target: Any) -> tuple[Any, dict[str, Any]]:
        """Return what computes a call on its shards, and the arguments that this takes besides."""
        kwargs: dict[str, Any] = {}
        if self._is_whole_loss(call, operator):
            target = whole_cross_entropy_sum
        elif call.offset_dim >= 0:
            shard = self.program.values[call.operands[0]]
            kwargs["offset"] = shard_offset(shard, call.offset_dim, self.site)
            target = with_offset(operator)
        elif operator.kind == attention.KIND and self.site.device.type == "cuda":
            target = attention.attend if operator.input_named("attn_mask") >= 0 else target
        if call.unpadded and operator.attribute("count_include_pad", True) is False:
            kwargs |= {"kernel": target, "outside": self._outside(call)}
            target = average_inside
        if self.float8 and is_float8_product(self.captured.graph, operator, self._shapes(call)):
            kwargs["by_row"] = self.float8 == "fp8-row"
            target = SCALED[operator.kind]
        return target, kwargs

    def _split(
        self, call: Call, operands: list[Any], run: Callable[[Sequence[Any]], Any], aside: Aside
    ) -> fx.Node:
        """Call a product whose parameters get their gradients later, held beside the graph."""
        values = self.program.values
        places = {
            position: self.place[value]
            for position, value in enumerate(call.operands)
            if values[value].role == "parameter"
        }
        name = f"product_{call.operator}"
        self.held[name] = Product(run, places, aside)
        return self.graph.call_function(run_split, (self.graph.get_attr(name), *operands))

    def _operands(self, call: Call, operator: Operator) -> list[Any]:
        """Return what a call reads, None for what its kernel leaves out."""
        found: list[Any] = [self._node(value) for value in call.operands]
        if self._is_whole_loss(call, operator):
            found[BLOCKS] = None
        for position in _read_detached(self.captured.graph, operator):
            found[position] = self.graph.call_function(
                torch.ops.aten.detach.default, (found[position],)
            )
        return found

    def _is_whole_loss(self, call: Call, operator: Operator) -> bool:
        graph = self.captured.graph
        return operator.kind == LOSS and is_whole(graph, operator, self._shapes(call)[0])

    def _shapes(self, call: Call) -> tuple[tuple[int, ...], ...]:
        return tuple(self.program.values[value].shape for value in call.operands)

    def _outside(self, call: Call) -> tuple[tuple[int, int, int], ...]:
        """Return (dim, rows before, rows after) of the halos that lie beyond the whole image."""
        found: list[tuple[int, int, int]] = []
        sizes, place = self.site.mesh.sizes, self.site.coordinate
        for halo in self.program.values[call.operands[0]].halos:
            is_first = all(place[axis] == 0 for axis in halo.axes)
            is_last = all(place[axis] == sizes[axis] - 1 for axis in halo.axes)
            found.append((halo.dim, halo.before * is_first, halo.after * is_last))
        return tuple(found)

    def _keep(self, call: Call, is_list: bool, result: fx.Node) -> None:
        for position, value in enumerate(call.results):
            if value < 0:
                continue
            node = result
            if is_list or len(call.results) > 1:
                node = self.graph.call_function(_item, (result, position))
            if call.scale != 1.0:
                node = self.graph.call_function(torch.mul, (node, call.scale))
            self.nodes[value] = self._running(value) or node

    def _running(self, value: int) -> fx.Node | None:
        """Return this device's shard of a running statistic where it stands in for a value."""
        entry = self.program.values[value]
        running = self.mode.statistics.get(entry.tensor)
        if running is None:
            return None
        start = shard_offset(entry, 1, self.site)
        self.held[f"running_{value}"] = running.narrow(0, start, entry.shape[1]).view(entry.shape)
        return self.graph.get_attr(f"running_{value}")

    def _first_on(self, axes: tuple[int, ...]) -> bool:
        return all(self.site.coordinate[axis] == 0 for axis in axes)

    def _reseed(self, call: Call) -> int:
        if self.randomness is None:
            first = next(iter(self.graph.nodes), None)  # none where a forward begins by drawing
            with self.graph.inserting_before(first):
                self.randomness = self.graph.get_attr("randomness")
        # Only the axes that split it: an operator that is whole draws alike under every plan.
        coordinate = tuple(
            place for place, name in zip(self.site.coordinate, call.dims, strict=True) if name
        )
        place = place_seed(call.operator, coordinate)
        self.graph.call_function(reseed, (self.randomness, place))
        return place

    def _opaque(self, call: Call, target: Any, tensors: list[fx.Node]) -> fx.Node:
        """Call a module as a whole: graphs can name functions only, so it is held beside them.

        It is always seeded, so that its replicas, and recomputation, draw the same numbers.
        """
        place = self._reseed(call)
        name = f"opaque_{call.operator}"
        self.held[name] = target
        mode = (self.mode.training, self.mode.writes and self.mode.training)
        drawn = (self.randomness, place)
        arguments = (self.graph.get_attr(name), tensors, drawn, mode)
        return self.graph.call_function(_run_opaque, arguments)


def _run_opaque(
    target: Opaque, tensors: list[Tensor], drawn: tuple[RandomSource, int], mode: tuple[bool, bool]
) -> Any:
    source, place = drawn
    with python_seeded(source.number(place)):
        return target(tensors, *mode)


def _run(
    target: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    silent: tuple[int, ...],
    operands: Sequence[Any],
) -> Any:
    """Run a call on tensors; those at the positions ``silent`` count elsewhere."""
    given = [_silent(one) if place in silent else one for place, one in enumerate(operands)]
    return target(*_fill(args, given), **{key: _fill(one, given) for key, one in kwargs.items()})


def _silent(tensor: Tensor) -> Tensor:
    """Return zeros, also of what is infinite (a mask that is added), through which no gradient comes."""
    return tensor.masked_fill(torch.ones((), dtype=torch.bool, device=tensor.device), 0)


def _item(results: Any, position: int) -> Any:
    return results[position]


def _fill(argument: Any, operands: Sequence[Any]) -> Any:
    """Return an argument with every ``Slot`` replaced by the operand it names."""
    if isinstance(argument, (list, tuple)):
        return type(argument)(_fill(item, operands) for item in argument)
    return operands[argument.index] if isinstance(argument, Slot) else argument


def _returns_list(target: Any) -> bool:
    schema = getattr(target, "_schema", None)
    if schema is None:
        return False
    returns = schema.returns
    return len(returns) > 1 or (len(returns) == 1 and str(returns[0].type).startswith("List"))


def with_settings(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], settings: dict[str, float]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments with those that the target has and ``settings`` names replaced."""
    schema = getattr(target, "_schema", None)
    if schema is None:
        return args, kwargs
    filled, named = list(args), dict(kwargs)
    for position, argument in enumerate(schema.arguments):
        if argument.name not in settings or str(argument.type) not in ("bool", "float"):
            continue
        if position < len(filled):
            filled[position] = settings[argument.name]
        else:
            named[argument.name] = settings[argument.name]
    return tuple(filled), named
