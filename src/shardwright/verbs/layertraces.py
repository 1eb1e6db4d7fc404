"""Synchronous SGD on traces of layers: read, predicted for any workers and network, and written."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from shardwright.core.graph import OperatorGraph
from shardwright.core.layertrace import Exchange, Iteration, LayerTrace, TracedLayer
from shardwright.core.plan import Frontier, Plan
from shardwright.core.program import Call, Program, Segment
from shardwright.errors import InputError
from shardwright.files.layertrace import read_layer_trace
from shardwright.files.networks import Points, read_network, read_points
from shardwright.files.planfile import write_atomically
from shardwright.layerwise.allreduce import (
    AUTO,
    Sizes,
    Wire,
    all_reduces,
    gtop_k_seconds,
    top_k_seconds,
)
from shardwright.layerwise.ssgd import EXCHANGES, SPARSE, Network, predict, selection
from shardwright.planner.cost import Rates, operator_costs
from shardwright.planner.lower import lower
from shardwright.verbs.evidence import document_of, evidence, picked
from shardwright.verbs.tracerequest import TraceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceStudy:
    """A trace and its iterations by workers and exchange; ``notes`` say what the network rests on."""

    trace: LayerTrace
    iterations: tuple[Iteration, ...]
    notes: tuple[str, ...]


def predict_trace(path: str | Path, request: TraceRequest) -> TraceStudy:
    """Predict iterations of synchronous SGD on a trace of layers, by every exchange.

    Raises InputError for a malformed trace or request.
    """
    trace, counts = read_layer_trace(path), request.counts
    points, wire, note = _network(request, counts)
    found: list[Iteration] = []
    for workers in counts:
        network = _of(workers, request, points, wire)
        known: list[Exchange] = [one for one in EXCHANGES if one not in SPARSE or network.sparse]
        found += [predict(trace, network, one) for one in known]
    return TraceStudy(trace=trace, iterations=tuple(found), notes=(note,))


def _network(request: TraceRequest, counts: tuple[int, ...]) -> tuple[Points, Wire | None, str]:
    """Return measured messages, or a wire, and the sentence about it."""
    if request.link.endswith(".csv"):
        if len(counts) > 1 or request.algorithm != AUTO:
            raise InputError(
                f"messages in {request.link} were measured between one number of workers, by one "
                "algorithm; give one number, and no --algorithm"
            )
        text = (
            f"Messages as measured in {request.link}; sparse exchanges were not, so none is shown."
        )
        return read_points(request.link), None, text
    latency, bandwidth, reduction = read_network(request.link)
    wire = Wire(latency=latency, bandwidth=bandwidth, reduction=reduction)
    how = "the fastest algorithm" if request.algorithm == AUTO else request.algorithm
    text = (
        f"Modelled: messages take {latency * 1e6:.4g} us and {bandwidth / 1e9:.4g} GB/s, adding up "
        f"{reduction * 1e9:.4g} ns a byte, all-reduce by {how}; sparse exchanges send {request.density:g} of all "
        f"numbers, chosen in {request.select:g} s x n log2 n."
    )
    return (), wire, text


def _of(workers: int, request: TraceRequest, points: Points, wire: Wire | None) -> Network:
    select = selection(request.select)
    if wire is None:
        dense = _measured(points) if workers > 1 else np.zeros_like
        return Network(
            workers=workers, dense=dense, sparse={}, select=select, density=request.density
        )
    return Network(
        workers=workers,
        dense=all_reduces(workers, wire, request.algorithm),
        sparse={
            "top-k": lambda kept: top_k_seconds(int(kept), workers, wire),
            "gtop-k": lambda kept: gtop_k_seconds(int(kept), workers, wire),
        },
        select=select,
        density=request.density,
    )


def _measured(points: Points) -> Callable[[Sizes], Sizes]:
    """Return the seconds of messages by their bytes: straight lines between measured ones, the last continued, and
    never less for more bytes."""
    sizes, seconds = np.array(points).T
    seconds = np.maximum.accumulate(seconds)
    slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
    return lambda asked: (
        np.interp(asked, sizes, seconds) + slope * np.maximum(asked - sizes[-1], 0.0)
    )


def save_layers(
    out: str | Path,
    plan: Plan | Frontier | str | Path,
    model: str = "",
    cluster: str = "",
    *,
    pick: int | None = None,
) -> Path:
    """Write the layers of a plan as a trace: what the modules of one rank take, and their gradients' bytes.

    Raises InputError for a pipeline, whose ranks do not run all layers.
    """
    document = document_of(plan)
    chosen = picked(document.frontier, pick)
    if len(chosen.strategy.meshes) > 1:
        raise InputError(
            "a trace of layers is of one rank that runs all of them, but this plan has "
            f"{len(chosen.strategy.meshes)} stages; --pick a plan without a pipeline"
        )
    graph, machine, costs = evidence(document, chosen, model, cluster, None)
    rates = Rates(
        cluster=machine, table=costs, device=chosen.strategy.devices[0],
        precision=chosen.strategy.precision,
    )  # fmt: skip
    layers = _layers(chosen, graph, rates)
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(("name", "forward", "backward", "bytes"))
    rows.writerows(
        (one.name, f"{one.forward_seconds:.9g}", f"{one.backward_seconds:.9g}", one.bytes)
        for one in layers
    )
    return write_atomically(out, text.getvalue().encode())


def _layers(plan: Plan, graph: OperatorGraph, rates: Rates) -> list[TracedLayer]:
    """Return what neighbouring operators of one module take in a step; a gradient belongs to the first
    layer that reads its parameter, whose backward comes last."""
    program = lower(graph, plan.strategy)
    seen, found = set[int](), list[TracedLayer]()
    for segment in program.segments:
        for call in segment.calls:
            new = [value for value in dict.fromkeys(call.operands) if value not in seen]
            seen.update(new)
            layer = _layer(program, graph, rates, (segment, call), new)
            if found and found[-1].name == layer.name:
                layer = _joined(found.pop(), layer)
            found.append(layer)
    return found


def _layer(
    program: Program,
    graph: OperatorGraph,
    rates: Rates,
    work: tuple[Segment, Call],
    new: list[int],
) -> TracedLayer:
    """Return one operator as a layer, whose parameters are those among the ``new`` values."""
    segment, call = work
    operator, values = graph.operators[call.operator], program.values
    shapes = tuple(values[value].shape for value in call.operands)
    forward, backward = (
        operator_costs(graph, call.operator, (shapes, call.result_shapes), rates)[phase].seconds
        for phase in ("forward", "backward")
    )
    pieces = program.strategy.pipeline.num_microbatches
    parameters = [values[value] for value in new if values[value].role == "parameter"]
    return TracedLayer(
        name=operator.module or operator.name,
        forward_seconds=pieces * forward,
        backward_seconds=pieces * backward if segment.has_backward else 0.0,
        bytes=sum(values[one.gradient].bytes for one in parameters if one.gradient >= 0),
    )


def _joined(one: TracedLayer, other: TracedLayer) -> TracedLayer:
    return replace(
        one,
        forward_seconds=one.forward_seconds + other.forward_seconds,
        backward_seconds=one.backward_seconds + other.backward_seconds,
        bytes=one.bytes + other.bytes,
    )
