"""Advice on how many devices are worth it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from shardwright.core.advice import Advice, Curve
from shardwright.core.scaling import Overhead, fit_overhead, largest_ratio
from shardwright.errors import InputError
from shardwright.files.advice import MOST_DEVICES, read_step_times
from shardwright.files.networks import read_network
from shardwright.layerwise.allreduce import Wire, all_reduce_seconds
from shardwright.report.units import bytes_text, seconds_text
from shardwright.verbs.advice.requests import PAPER, DeviceRequest
from shardwright.verbs.request import Request, Watch


def advise_devices(
    request: DeviceRequest,
    model: str = "",
    cluster: str = "",
    global_batch: int | None = None,
    watch: Watch | None = None,
) -> Advice:
    """Say how many devices are worth it, from measured steps; beside them, where a model is given, what the simulator
    predicts of the fastest plan for each number of devices of a cluster.

    Raises InputError where neither gives two steps, and NoPlan where nothing fits.
    """
    simulated, source = _simulated(model, cluster, global_batch, watch or Watch())
    measured = read_step_times(request.measured) if request.measured else ()
    points = measured or simulated
    if len(points) < 2:
        raise InputError(
            "a number of devices follows from at least two measured or simulated steps; give --measured "
            "1:10s,2:5.4s, or --model with --cluster"
        )
    known, network = _known_seconds(request)
    overhead = fit_overhead(points, known)
    seconds = _total(overhead, known)
    most = _most_devices(overhead, seconds, request)
    return Advice(
        title="How many devices",
        answers=(
            _device_answer(most, request.efficiency, seconds),
            *_overhead_answers(overhead, request, points, seconds),
            *_simulated_answer(simulated, request.efficiency),
        ),
        inputs=(
            ("simulated steps" if points is simulated else "measured steps",
             ", ".join(f"{k}: {seconds_text(t)}" for k, t in points)),
            ("wanted efficiency", f"{request.efficiency:.0%}"),
            *network,
        ),
        assumptions=_assumptions(points, request),
        sources=_sources(request, source),
        columns=("devices", "step", "speed-up", "efficiency", "doubling gains", "simulated"),
        rows=tuple(_device_rows(seconds, most, points, simulated)),
        curves=_device_curves(seconds, most, points, simulated),
        values={
            "devices": most,
            "compute_seconds": overhead.compute_seconds,
            "overhead_seconds": overhead.overhead_seconds,
            "ratio": overhead.ratio,
            "limit": overhead.limit,
            "measured": measured,
            "simulated": simulated,
            "simulated_devices": _simulated_most(simulated, request.efficiency),
        },
    )  # fmt: skip


def _simulated(
    model: str, cluster: str, global_batch: int | None, watch: Watch
) -> tuple[tuple[tuple[int, float], ...], str]:
    """Return (devices, seconds) of the fastest plans by devices, and what they rest on; nothing without a model."""
    if not model:
        if cluster:
            raise InputError(
                "a cluster is simulated with a model; give --model, or leave out --cluster"
            )
        return (), ""
    from shardwright.verbs.study import study

    found = study(model, cluster, Request(mode="curve", global_batch=global_batch), watch)
    points = {
        len(plan.strategy.devices): plan.objective.step_seconds
        for plan in sorted(found.curve, key=lambda one: -one.objective.step_seconds)
    }
    source = (
        f"{model} on {found.cluster.name}, the fastest plan for each number (`plan --mode curve`)"
    )
    return tuple(sorted(points.items())), source


def _simulated_most(simulated: Sequence[tuple[int, float]], efficiency: float) -> int | None:
    """Return the most simulated devices of an efficiency, that of the fewest being 1; None without any."""
    if not simulated:
        return None
    first, least = simulated[0]
    return max(k for k, seconds in simulated if first * least >= efficiency * k * seconds)


def _simulated_answer(simulated: Sequence[tuple[int, float]], efficiency: float) -> tuple[str, ...]:
    most = _simulated_most(simulated, efficiency)
    if most is None:
        return ()
    return (
        f"Simulated, each number with its fastest plan: {most:,} of {simulated[-1][0]:,} are the most with "
        f"{efficiency:.0%}, against {simulated[0][0]}.",
    )


def _assumptions(points: Sequence[tuple[int, float]], request: DeviceRequest) -> tuple[str, ...]:
    same = "The global batch is the same on any number of devices (strong scaling)."
    if request.gradients:
        return same, "Gradients travel after backward, not beside it: at most so much do they cost."
    alike = "Overhead is the same on any number of devices; with --gradients and --link an all-reduce grows."
    if points[0][0] > 1:
        return same, alike
    return same, alike, "One device exchanges nothing: measure 2 and 4 rather than 1 and 2."


def _sources(request: DeviceRequest, simulated: str) -> tuple[str, ...]:
    said = [f"{PAPER}, lemma on the number of GPUs: R_O from T(G) = T_C / G + T_O"]
    if request.gradients:
        said.append("ring, tree and halving-doubling: Thakur et al., 2005")
    if simulated:
        said.append(f"simulated steps: {simulated}")
    return tuple(said)


def _known_seconds(
    request: DeviceRequest,
) -> tuple[Callable[[int], float], tuple[tuple[str, str], ...]]:
    """Return what exchanging gradients takes by devices, and the inputs it rests on."""
    if not request.gradients:
        return lambda devices: 0.0, ()
    latency, bandwidth, reduction = read_network(request.link)
    wire = Wire(latency=latency, bandwidth=bandwidth, reduction=reduction)
    size = request.gradient_bytes
    network = f"{request.link}: {latency * 1e6:.4g} us, {bandwidth / 1e9:.4g} GB/s"
    inputs = ("gradients", bytes_text(size)), ("network", network)
    return lambda devices: all_reduce_seconds(size, devices, wire), inputs


def _total(overhead: Overhead, known: Callable[[int], float]) -> Callable[[int], float]:
    return lambda devices: overhead.seconds(devices) + known(devices)


def _most_devices(
    overhead: Overhead, seconds: Callable[[int], float], request: DeviceRequest
) -> int | None:
    """Return the largest number of the wanted efficiency, None where any has it: by the closed form, or where
    messages grow by halving the interval, since efficiency falls."""
    if not request.gradients:
        return overhead.most_devices(request.efficiency)

    def is_enough(devices: int) -> bool:
        return seconds(1) >= request.efficiency * devices * seconds(devices)

    low, high = 1, 2
    while is_enough(high):
        low, high = high, 2 * high
        if high > MOST_DEVICES:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_enough(middle) else (low, middle)
    return low


def _device_answer(most: int | None, efficiency: float, seconds: Callable[[int], float]) -> str:
    if most is None:
        return (
            f"Any number of devices keeps an efficiency of {efficiency:.0%}: no overhead was seen."
        )
    speedup = seconds(1) / seconds(most)
    are = "1 device is" if most == 1 else f"{most:,} devices are"
    return (
        f"{are} the most with an efficiency of at least {efficiency:.0%}: "
        f"{seconds_text(seconds(most))} a step, {speedup:.2f} times as fast as one."
    )


def _overhead_answers(
    overhead: Overhead,
    request: DeviceRequest,
    points: Sequence[tuple[int, float]],
    seconds: Callable[[int], float],
) -> list[str]:
    parts = (
        f"{seconds_text(overhead.compute_seconds)} are shared, {seconds_text(overhead.overhead_seconds)} are "
        f"not: R_O = {overhead.ratio:.4g}"
    )
    limit = "" if math.isinf(overhead.limit) or request.gradients else (
        f"; no number of devices is more than {overhead.limit:.2f} times as fast as one"
    )  # fmt: skip
    said = [f"Of one device's step {parts}{limit}."]
    if not overhead.compute_seconds:
        said.append("Steps get no shorter with more devices: nothing of them is shared.")
    if not overhead.overhead_seconds and len(points) == 2:
        said.append(
            "Steps get shorter by more than their share; caches may hold more, or the clock is noisy."
        )
    if len(points) > 2:
        off = max(abs(seconds(devices) / time - 1) for devices, time in points)
        said.append(
            f"The formula is at most {off:.1%} off the {len(points)} steps it was fitted to."
        )
    doubled = 2 * points[-1][0]
    ratio = largest_ratio(doubled, request.efficiency)
    if math.isfinite(ratio) and not request.gradients:
        said.append(f"{doubled} devices are that efficient where R_O is at most {ratio:.4f}.")
    return said


def _device_rows(
    seconds: Callable[[int], float],
    most: int | None,
    points: Sequence[tuple[int, float]],
    simulated: Sequence[tuple[int, float]],
) -> list[tuple[str, ...]]:
    played = dict(simulated)
    counts = {2**k for k in range(11)} | {k for k, _ in points} | played.keys() | {most or 1}
    last = max(4 * (most or 64), points[-1][0], *played, 8)
    rows: list[tuple[str, ...]] = []
    for count in sorted(one for one in counts if one <= last):
        speedup = seconds(1) / seconds(count)
        rows.append(
            (
                f"{count:,}" + (" ▸" if count == most else ""),
                seconds_text(seconds(count)),
                f"{speedup:.2f}x",
                f"{speedup / count:.0%}",
                f"{seconds(count) / seconds(2 * count):.2f}x",
                seconds_text(played[count]) if count in played else "-",
            )
        )
    return rows


def _device_curves(
    seconds: Callable[[int], float],
    most: int | None,
    points: Sequence[tuple[int, float]],
    simulated: Sequence[tuple[int, float]],
) -> tuple[Curve, ...]:
    last = min(max(4 * (most or 16), points[-1][0], 8), 4096)
    counts = sorted({max(1, round(last ** (k / 40))) for k in range(41)})
    one = seconds(1)
    lines = [("fitted", tuple((float(k), one / seconds(k)) for k in counts))]
    lines.append(("every device in full", tuple((float(k), float(k)) for k in counts)))
    lines.append(("given", tuple((float(k), one / t) for k, t in points)))
    if simulated:
        lines.append(("simulated", tuple((float(k), one / t) for k, t in simulated)))
    marked = ((float(most), one / seconds(most)),) if most else ()
    return (
        Curve(title="Speed-up by devices", across="devices", up="times one device", lines=tuple(lines),
              marked=marked),
    )  # fmt: skip
