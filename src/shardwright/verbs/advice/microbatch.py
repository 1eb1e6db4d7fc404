"""Advice on the largest microbatch: what the planner's memory model lets on one device, and what runs here."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shardwright.core.advice import Advice, Curve
from shardwright.core.cluster import Cluster
from shardwright.core.costs import CostTable
from shardwright.errors import InputError
from shardwright.planner.search import Context, Limits, as_strategy, evaluate_closely, room
from shardwright.planner.space import Seed
from shardwright.report.units import bytes_text, seconds_text
from shardwright.verbs.advice.requests import MicrobatchRequest
from shardwright.verbs.request import Request, Watch

# Sizes that are looked at in the end: each captures the model.
MOST_TRIED = 24


# Precisions that plain PyTorch trains in without more ado.
SEARCHED = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True)
class Size:
    """A batch on one device, as predicted or as it ran (then without seconds)."""

    batch: int
    bytes: float
    seconds: float


def advise_microbatch(
    model: str, cluster: str, request: MicrobatchRequest, watch: Watch | None = None
) -> Advice:
    """Say how many samples one device takes at once, by the planner's memory model and, if asked for, by search.

    Raises InputError where not even one is predicted to fit, naming what it needs.
    """
    from shardwright.verbs.precision import possible_precision
    from shardwright.verbs.subject import find_cluster

    watch = watch or Watch()
    machine, is_local = find_cluster(cluster, watch)
    asked = Request(
        optimizer=request.optimizer,
        precision=possible_precision(machine, request.precision),
        memory_limit=request.memory or None,
    )
    limits = Limits(memory_bytes=asked.memory_bytes)

    def size(batch: int) -> Size:
        watch.tell(f"predicting a batch of {batch}", 0.5)
        return _predicted(model, batch, (machine, asked), request)

    bound = room(machine, limits)
    tried = largest(size, bound, request.most)
    best, beyond = _around(tried, bound)
    found = _searched(model, asked, request, bound, watch) if request.search else []
    where = "this machine" if is_local else machine.name
    return Advice(
        title="Largest microbatch",
        answers=(
            f"A device takes {best.batch:,} samples at once: {bytes_text(best.bytes)} of "
            f"{bytes_text(bound)} at the peak, as predicted.",
            _next_text(beyond, request),
            *_searched_text(found, bound, best, asked.precision),
        ),
        inputs=(
            ("model", model),
            ("device", f"{machine.kinds[0].name} of {where}"),
            ("memory to plan with", bytes_text(bound)),
            ("optimizer", asked.optimizer),
            ("precision", asked.precision),
            ("recomputation", "every repeated block" if request.recompute else "none"),
        ),
        assumptions=(
            "One device holds the whole model: no ZeRO, no tensor or pipeline parallelism.",
            "Memory is what tensors take, as the simulator plays the step; fragmentation of an allocator and other "
            "programs come on top. `shardwright verify` and `compare` measure it.",
            "A bigger batch never needs less memory.",
        ),
        sources=("simulated: the Program of the model on one device (docs/concepts/simulate.md)",
                 "seconds: modelled from the device's rates",
                 *["by search: measured here, steps of plain PyTorch"][: len(found)]),
        columns=("samples", "peak", "step", "samples/s"),
        rows=_rows(tried, best),
        curves=(_curve(tried, found, bound, best),),
        values={"batch": best.batch, "bytes": best.bytes, "bound_bytes": bound, **_looked_at(tried, found, bound)},
    )  # fmt: skip


def _looked_at(tried: list[Size], found: list[Size], bound: float) -> dict[str, Any]:
    """Return the sizes that were predicted and those that ran, as values."""
    fits = max((one.batch for one in found if one.bytes <= bound), default=0)
    return {
        "tried": [(one.batch, one.bytes, one.seconds) for one in tried],
        "searched": [(one.batch, one.bytes) for one in found],
        "searched_batch": fits if found else None,
    }


def _around(tried: list[Size], bound: float) -> tuple[Size, Size | None]:
    """Return the largest that fits, and the smallest that does not, if one was looked at. Raises InputError."""
    ordered = sorted(tried, key=lambda one: one.batch)
    fits = [one for one in ordered if one.bytes <= bound]
    if not fits:
        raise InputError(
            f"not even one sample fits in {bytes_text(bound)}: it needs {bytes_text(tried[0].bytes)} "
            f"({tried[0].bytes:,.0f} bytes); recompute (--recompute), take a narrower --precision, or plan for "
            "several devices"
        )
    return fits[-1], next((one for one in ordered if one.bytes > bound), None)


def _searched(
    model: str, asked: Request, request: MicrobatchRequest, bound: float, watch: Watch
) -> list[Size]:
    """Run steps of one size after another on this machine until one sample more does not fit."""
    from shardwright.runtime.capture import load_model
    from shardwright.runtime.fit import step_bytes

    if asked.precision not in SEARCHED:
        raise InputError(
            f"a search runs plain PyTorch in {' or '.join(SEARCHED)}, not in {asked.precision}; choose --precision "
            f"{SEARCHED[0]}, or leave out --search"
        )
    source = load_model(model)

    def size(batch: int) -> Size:
        watch.tell(f"running a batch of {batch}", 0.8)
        taken = step_bytes(
            source, batch, request.seq, optimizer=request.optimizer, precision=asked.precision,
            recompute=request.recompute,
        )  # fmt: skip
        return Size(batch, taken, 0.0)

    return largest(size, bound, request.most)


def _searched_text(found: list[Size], bound: float, best: Size, precision: str) -> list[str]:
    """Say what runs here; nothing where nothing ran."""
    if not found:
        return []
    fits = max((one for one in found if one.bytes <= bound), key=_batch, default=None)
    beyond = min((one for one in found if one.bytes > bound), key=_batch, default=None)
    how = f"plain PyTorch in {precision}"
    if fits is None:
        return [f"By search not even one sample fits here: it takes {_taken(found[0])} ({how})."]
    more = f"; {beyond.batch:,} would take {_taken(beyond)}" if beyond else ""
    return [
        f"By search {fits.batch:,} samples fit here, {fits.batch / best.batch - 1:+.1%} of what was predicted: "
        f"{bytes_text(fits.bytes)} at the peak{more} ({how})."
    ]


def _batch(one: Size) -> int:
    return one.batch


def _taken(one: Size) -> str:
    return bytes_text(one.bytes) if math.isfinite(one.bytes) else "more than this machine has"


def _rows(tried: list[Size], best: Size) -> tuple[tuple[str, ...], ...]:
    return tuple(
        (
            f"{one.batch:,}" + (" ▸" if one is best else ""),
            bytes_text(one.bytes),
            seconds_text(one.seconds),
            f"{one.batch / one.seconds:,.4g}",
        )
        for one in sorted(tried, key=lambda one: one.batch)
    )


def _predicted(
    model: str, batch: int, about: tuple[Cluster, Request], request: MicrobatchRequest
) -> Size:
    from shardwright.verbs.subject import capture, training_for

    machine, asked = about
    graph = capture(model, global_batch=batch, seq=request.seq, precision=asked.precision).graph
    context = Context.of(graph, machine, CostTable(), training_for(asked)).on(1)
    strategy = as_strategy(context, Seed(recompute=request.recompute))
    _, _, found = evaluate_closely(context, strategy)
    return Size(batch, found.objective.peak_bytes, found.objective.step_seconds)


def largest(size: Callable[[int], Size], bound: float, most: int) -> list[Size]:
    """Return the sizes looked at: the largest that fits is among them, and one more than it unless that is ``most``.

    Memory is nearly a line in the batch, so the next size is where the line through the nearest two on either
    side meets the bound; where that comes to nothing the interval is halved.
    """
    found = [size(1)]
    if found[0].bytes > bound or most == 1:
        return found
    found.append(size(2))
    while found[-1].bytes <= bound and found[-1].batch < most and len(found) < MOST_TRIED:
        found.append(size(min(most, _beyond(found[-2], found[-1], bound))))
    low, high = found[-2:]
    while high.bytes > bound and high.batch - low.batch > 1 and len(found) < MOST_TRIED:
        found.append(size(_between(low, high, bound)))
        low, high = (found[-1], high) if found[-1].bytes <= bound else (low, found[-1])
    return found


def _beyond(low: Size, high: Size, bound: float) -> int:
    """Return where the line through two sizes leaves the bound behind."""
    slope = max((high.bytes - low.bytes) / (high.batch - low.batch), 1e-9)
    return high.batch + max(1, int((bound - high.bytes) / slope) + 1)


def _between(low: Size, high: Size, bound: float) -> int:
    """Return where the line through two sizes meets the bound, or the nearest size between them; the middle where
    the higher could not be measured."""
    if math.isinf(high.bytes):
        return (low.batch + high.batch) // 2
    share = (bound - low.bytes) / (high.bytes - low.bytes)
    guess = low.batch + int(share * (high.batch - low.batch))
    return min(max(guess, low.batch + 1), high.batch - 1)


def _next_text(beyond: Size | None, request: MicrobatchRequest) -> str:
    if beyond is None:
        return f"{request.most:,} samples were looked at at most (--most)."
    return f"{beyond.batch:,} would need {bytes_text(beyond.bytes)}."


def _curve(tried: list[Size], found: list[Size], bound: float, best: Size) -> Curve:
    ran = sorted((one for one in found if math.isfinite(one.bytes)), key=_batch)
    points = sorted(tried, key=lambda one: one.batch)
    ends = float(points[0].batch), float(points[-1].batch)
    return Curve(
        title="Peak memory by microbatch",
        across="samples",
        up="GiB",
        lines=(
            ("predicted", tuple((float(one.batch), one.bytes / 2**30) for one in points)),
            *(
                [("measured", tuple((float(one.batch), one.bytes / 2**30) for one in ran))]
                if ran
                else []
            ),
            ("memory", tuple((end, bound / 2**30) for end in ends)),
        ),
        marked=((float(best.batch), best.bytes / 2**30),),
    )
