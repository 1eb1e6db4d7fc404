"""Messages of tensor parallelism that run beneath the product beside them, piece by piece.

Where activations between tensor-parallel regions are split, what a product reads is gathered and
what it makes is scattered. Transformer Engine (``--tp-comm-overlap``, in rings) and PyTorch's async
tensor parallelism cut both into as many pieces as there are devices: while one is multiplied the next
travels. So the message takes what the product leaves uncovered, and one piece at least. An
all-reduce has no such piece, and between hosts nothing is cut.

Wrong where cut products are slower than whole ones, which small ones are.
"""

from __future__ import annotations

from shardwright.core.costs import Cost
from shardwright.core.graph import OperatorGraph
from shardwright.core.program import Call, Program
from shardwright.operators.counting.products import MATMUL
from shardwright.operators.derivatives import base_kind

Beside = tuple[int, Call, str]  # mesh, call, phase


def products_beside(program: Program, graph: OperatorGraph) -> dict[int, list[Beside]]:
    """Return, by message, the products that read what it gathers or make what it scatters."""
    read, made = _readers_and_makers(program, graph)
    found: dict[int, list[Beside]] = {}
    for number, message in enumerate(program.messages):
        if message.purpose not in ("activation", "gradient") or len(message.sources) != 1:
            continue
        if message.primitive == "all_gather":
            found[number] = read.get(message.results[0], [])
        elif message.primitive == "reduce_scatter":
            found[number] = made.get(message.sources[0], [])
    return {number: products for number, products in found.items() if products}


def _readers_and_makers(
    program: Program, graph: OperatorGraph
) -> tuple[dict[int, list[Beside]], dict[int, list[Beside]]]:
    """Return, by value, the products that read it and those that make it."""
    values = program.values
    read: dict[int, list[Beside]] = {}
    made: dict[int, list[Beside]] = {}
    for segment in program.segments:
        for call in segment.calls:
            if base_kind(graph.operators[call.operator].kind) not in MATMUL:
                continue
            for ends, forward, backward in (
                (call.operands, read, made), (call.results, made, read),
            ):  # fmt: skip
                for value in ends:
                    if value < 0 or values[value].role == "parameter":
                        continue
                    forward.setdefault(value, []).append((segment.mesh, call, "forward"))
                    # The backward of a call reads its results' gradients and makes its operands'.
                    if segment.has_backward and (gradient := values[value].gradient) >= 0:
                        backward.setdefault(gradient, []).append((segment.mesh, call, "backward"))
    return read, made


def num_products(phase: str) -> int:
    """Return how many products a call runs, of which one waits for a message or makes it."""
    return 2 if phase == "backward" else 1


def exposed(message: Cost, product_seconds: float, pieces: int) -> Cost:
    """Return what a message in so many pieces adds to the product that it runs beneath."""
    covered = product_seconds * (1 - 1 / pieces)
    seconds = max(message.seconds - covered, message.seconds / pieces)
    share = seconds / message.seconds if message.seconds else 0.0
    return Cost(seconds=seconds, spread=message.spread * share, source=message.source)
