"""Advice on the batch size, from the noise of gradients: time and money to the same loss."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.core.advice import Advice, Curve
from shardwright.core.noise import Tradeoff
from shardwright.files.advice import read_batch_times
from shardwright.report.units import count_text, dollars_text, seconds_text
from shardwright.verbs.advice.requests import BatchRequest

SOURCE = "McCandlish et al., An Empirical Model of Large-Batch Training (arXiv 1812.06162)"


# A batch between measured ones is worth measuring from this share of the time on.
LEAST = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOption:
    """One batch on so many devices: seconds and dollars to the target."""

    batch: int
    devices: int
    step_seconds: float
    seconds: float
    dollars: float
    is_beaten: bool = False

    @property
    def device_seconds(self) -> float:
        """What is paid for, of all devices."""
        return self.devices * self.seconds


def advise_batch(request: BatchRequest) -> Advice:
    """Say which batch reaches a loss soonest, and which for the least money, from a noise scale and measured steps."""
    trade = Tradeoff(noise_scale=request.noise, least_steps=request.least_steps)
    options = _options(request, trade)
    between = _between(options, trade)
    is_absolute = request.least_steps > 1
    batches = sorted({one.batch for one in options}) or _around(request.noise)
    return Advice(
        title="Batch size by the noise of gradients",
        answers=(
            f"The critical batch is {count_text(trade.noise_scale)} samples: with it training takes twice the "
            "least steps and twice the least samples.",
            *_best(options, is_absolute),
            *_worth_measuring(between, options),
            _learning_rate(request, options),
        ),
        inputs=(
            ("noise scale", f"{request.noise:,.4g} samples"),
            ("steps to the target without noise",
             f"{request.least_steps:,.4g}" if is_absolute else "not given: time and cost are relative to the least"),
            ("measured steps", request.measured or "none"),
            ("price of a device", request.price or "none: device-seconds instead"),
        ),
        assumptions=(
            "Steps to a loss are S_min (1 + noise / B), with the learning rate tuned for each batch.",
            "The noise scale grows while the loss falls: measure it late in training, or again.",
            "It is that of the optimizer's plain gradient; Adam's own step sees another metric.",
            "Only measured pairs of batch and devices are compared; between two batches of as many devices a step "
            "is taken to lie on a line.",
        ),
        sources=(f"{SOURCE}: steps against samples",
                 "linear rule with warm-up: Goyal et al., 2017; square root for Adam: Malladi et al., 2022"),
        columns=("batch", "devices", "steps", "samples", "step", "time", "cost", "learning rate"),
        rows=tuple(_rows(request, trade, options, batches)),
        curves=_curves(trade, options),
        values={
            "critical_batch": trade.noise_scale,
            "between": between and {
                "batch": between.batch, "devices": between.devices, "step_seconds": between.step_seconds,
                "seconds": between.seconds,
            },
            "options": [
                {
                    "batch": one.batch, "devices": one.devices, "step_seconds": one.step_seconds,
                    "steps": trade.steps(one.batch), "seconds": one.seconds, "dollars": one.dollars,
                    "device_seconds": one.device_seconds, "is_beaten": one.is_beaten,
                    "learning_rate": _rate(request, one.batch),
                }
                for one in options
            ],
        },
    )  # fmt: skip


def _options(request: BatchRequest, trade: Tradeoff) -> list[BatchOption]:
    found: list[BatchOption] = []
    for batch, devices, step in read_batch_times(request.measured) if request.measured else ():
        seconds = trade.steps(batch) * step
        dollars = seconds * devices * request.dollars_per_second
        found.append(
            BatchOption(
                batch=batch, devices=devices, step_seconds=step, seconds=seconds, dollars=dollars
            )
        )
    return [_judged(one, found) for one in found]


def _between(options: Sequence[BatchOption], trade: Tradeoff) -> BatchOption | None:
    """Return what would reach the target soonest between measured batches of as many devices, where a step is a line
    a + b B: S_min (1 + N / B) (a + b B) is least at B = sqrt(a N / b). None where no measured one is slower by LEAST."""
    found: list[BatchOption] = []
    ordered = sorted(options, key=lambda one: (one.devices, one.batch))
    for low, high in itertools.pairwise(ordered):
        if low.devices != high.devices or low.batch == high.batch:
            continue
        slope = (high.step_seconds - low.step_seconds) / (high.batch - low.batch)
        fixed = low.step_seconds - slope * low.batch
        if slope <= 0 or fixed <= 0:
            continue
        batch = round(math.sqrt(fixed * trade.noise_scale / slope))
        if low.batch < batch < high.batch:
            step = fixed + slope * batch
            seconds = trade.steps(batch) * step
            found.append(
                BatchOption(
                    batch=batch,
                    devices=low.devices,
                    step_seconds=step,
                    seconds=seconds,
                    dollars=0.0,
                )
            )
    best = min(found, key=lambda one: one.seconds, default=None)
    if best is None or best.seconds > (1 - LEAST) * min(one.seconds for one in options):
        return None
    return best


def _worth_measuring(between: BatchOption | None, options: Sequence[BatchOption]) -> list[str]:
    if between is None:
        return []
    saved = 1 - between.seconds / min(one.seconds for one in options)
    return [
        f"Measure a batch of {between.batch:,} on {between.devices} device(s) too: between its neighbours' steps it "
        f"would take {saved:.0%} less time than the soonest."
    ]


def _judged(one: BatchOption, every: Sequence[BatchOption]) -> BatchOption:
    mine = one.seconds, one.device_seconds
    theirs = [(other.seconds, other.device_seconds) for other in every]
    is_beaten = any(a <= mine[0] and b <= mine[1] and (a, b) != mine for a, b in theirs)
    return BatchOption(
        batch=one.batch, devices=one.devices, step_seconds=one.step_seconds, seconds=one.seconds,
        dollars=one.dollars, is_beaten=is_beaten,
    )  # fmt: skip


def _around(noise: float) -> list[int]:
    """Return powers of two around a noise scale."""
    middle = round(math.log2(noise))
    return sorted({2 ** max(0, middle + k) for k in range(-4, 5)})


def _best(options: Sequence[BatchOption], is_absolute: bool) -> list[str]:
    if not options:
        return ["With --measured, time and cost to the target are compared."]
    soonest = min(options, key=lambda one: (one.seconds, one.device_seconds))
    cheapest = min(options, key=lambda one: (one.device_seconds, one.seconds))
    said = [f"Soonest: a batch of {soonest.batch:,} on {soonest.devices} device(s)."]
    if cheapest is soonest:
        said = [
            f"Soonest and cheapest: a batch of {soonest.batch:,} on {soonest.devices} device(s)."
        ]
    else:
        saved = 1 - cheapest.device_seconds / soonest.device_seconds
        said.append(
            f"Cheapest: a batch of {cheapest.batch:,} on {cheapest.devices} device(s), {saved:.0%} less "
            f"device time, {cheapest.seconds / soonest.seconds:.2f} times as long."
        )
    if is_absolute:
        said[0] = said[0][:-1] + f", in {seconds_text(soonest.seconds)}."
    return said


def _rate(request: BatchRequest, batch: int) -> float | None:
    """Return the learning rate by the rule: linear for SGD, square root for Adam."""
    if not request.learning_rate:
        return None
    ratio = batch / request.tuned_at
    return request.learning_rate * (math.sqrt(ratio) if "adam" in request.optimizer else ratio)


def _learning_rate(request: BatchRequest, options: Sequence[BatchOption]) -> str:
    adam = "adam" in request.optimizer
    rule = "with the square root of the batch" if adam else "with the batch, after a warm-up"
    text = f"Scale the learning rate {rule} ({request.optimizer}), up to the critical batch; beyond it leave it."
    beyond = [one.batch for one in options if one.batch > request.noise]
    if beyond and request.learning_rate:
        text += (
            f" A batch of {min(beyond):,} and more is beyond: the rule's rates there are too high."
        )
    return text


def _rows(
    request: BatchRequest,
    trade: Tradeoff,
    options: Sequence[BatchOption],
    batches: Sequence[int],
) -> list[tuple[str, ...]]:
    def row(batch: int, devices: str, *rest: str) -> tuple[str, ...]:
        rate = _rate(request, batch)
        return (
            f"{batch:,}", devices, f"{trade.steps(batch):,.4g}", f"{trade.samples(batch):,.4g}", *rest,
            f"{rate:.3g}" if rate else "-",
        )  # fmt: skip

    if not options:
        return [row(batch, "-", "-", "-", "-") for batch in batches]
    least = _least(options)
    return [
        row(
            one.batch, str(one.devices), seconds_text(one.step_seconds), *_told(one, request, least)
        )
        for one in options
    ]


def _least(options: Sequence[BatchOption]) -> tuple[float, float]:
    """Return the least seconds and the least device-seconds."""
    return min(one.seconds for one in options), min(one.device_seconds for one in options)


def _told(one: BatchOption, request: BatchRequest, least: tuple[float, float]) -> tuple[str, str]:
    """Write time and cost; relative to the least of each where the steps are."""
    mark = "" if one.is_beaten else " ▸"
    if request.least_steps <= 1:
        return f"{one.seconds / least[0]:.2f}x{mark}", f"{one.device_seconds / least[1]:.2f}x"
    cost = dollars_text(one.dollars) if request.price else f"{one.device_seconds:,.4g} device-s"
    return f"{seconds_text(one.seconds)}{mark}", cost


def _curves(trade: Tradeoff, options: Sequence[BatchOption]) -> tuple[Curve, ...]:
    sizes = [trade.noise_scale * 2 ** (k / 4) for k in range(-24, 25)]
    curve = tuple((trade.steps(size), trade.samples(size)) for size in sizes)
    here = ((trade.steps(trade.noise_scale), trade.samples(trade.noise_scale)),)
    found = [Curve(title="Samples against steps, by batch size", across="steps to the target", up="samples",
                   lines=(("every batch size", curve),), marked=here)]  # fmt: skip
    if options:
        lines = tuple(
            (
                f"{devices} device(s)",
                tuple(
                    (one.device_seconds, one.seconds) for one in options if one.devices == devices
                ),
            )
            for devices in sorted({one.devices for one in options})
        )
        best = tuple((one.device_seconds, one.seconds) for one in options if not one.is_beaten)
        found.append(Curve(title="Time against device time to the target", across="device-seconds",
                           up="seconds", lines=lines, marked=best))  # fmt: skip
    return tuple(found)
