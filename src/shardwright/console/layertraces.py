"""How a trace of layers sounds."""

from __future__ import annotations

from dataclasses import asdict

from rich.text import Text

from shardwright.console.terminal import Terminal
from shardwright.report.layertraces import COLUMNS, iteration_rows
from shardwright.report.tables import filled_table
from shardwright.report.units import bytes_text, seconds_text
from shardwright.verbs.layertraces import TraceStudy


def show_trace(terminal: Terminal, found: TraceStudy) -> None:
    """Print every iteration, and what it rests on."""
    trace = found.trace
    title, rows = "One iteration of synchronous SGD (simulated)", iteration_rows(found.iterations)
    table = filled_table(title, COLUMNS, rows, left=("exchange", "binds"))
    forward = sum(layer.forward_seconds for layer in trace.layers)
    backward = sum(layer.backward_seconds for layer in trace.layers)
    text = (
        f"{len(trace.layers)} layers, {bytes_text(trace.bytes)} of gradients; forward {seconds_text(forward)}, "
        f"backward {seconds_text(backward)}, input {seconds_text(trace.fetch_seconds + trace.copy_seconds)}, "
        f"update {seconds_text(trace.update_seconds)}."
    )
    terminal.say(table, Text(text), *(Text(note, style="dim") for note in found.notes))
    terminal.emit(
        trace=trace.name,
        num_layers=len(trace.layers),
        bytes=trace.bytes,
        notes=found.notes,
        iterations=[
            asdict(one)
            | {"speedup": one.speedup, "efficiency": one.efficiency, "binding": one.binding}
            for one in found.iterations
        ],
    )
    terminal.next(
        "`shardwright.ddp.plan_buckets` plans the buckets of a real model on its own network"
    )
