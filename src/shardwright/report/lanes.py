"""Orders of pipelines drawn as swim lanes: a row per worker, time to the right.

As text every action is its phase (F, B, I or W) and the microbatch, drawn out with the phase's mark;
as a picture (SVG) colours tell phases, and a lighter shade the later stages of one worker.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

import numpy as np

from shardwright.core.profile import Bar
from shardwright.core.program import Kind, Program
from shardwright.core.timeline import Timeline
from shardwright.report.units import seconds_text

Lanes = Sequence[Sequence[Bar]]
WIDTH = 100  # letters, and a tenth of the units of a picture
MARKS = {"F": "=", "B": "-", "I": "-", "W": "~"}
IDLE = "."
COLOURS = {"F": "#4477aa", "B": "#ee6677", "I": "#ee6677", "W": "#228833"}
PHASES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
ROW, GAP, LEFT, UNIT = 22, 4, 70, 9
COMPUTES = {
    Kind.FORWARD: "F", Kind.RECOMPUTE: "B", Kind.BACKWARD: "B", Kind.INPUT_GRADIENT: "I",
    Kind.WEIGHT_GRADIENT: "W",
}  # fmt: skip
MINIBATCHES = 8  # of a pipeline that is never flushed
MOST_NAMED = 2000  # actions of a picture that carry their number


def lanes_text(lanes: Lanes, width: int = WIDTH, beside: int = 1) -> str:
    """Return lanes of so many letters, and what they mean; a worker has so many ``beside`` each other.

    Actions shorter than a letter vanish behind their neighbours.
    """
    finish = _finish(lanes)
    rows: list[str] = []
    for number, lane in enumerate(lanes):
        row = [IDLE] * width
        for bar in lane:
            first, stop = (round(time / finish * width) for time in (bar.start, bar.end))
            text = f"{bar.phase}{bar.microbatch}"[: stop - first]
            row[first:stop] = text.ljust(stop - first, MARKS[bar.phase])
        rows.append(f"{number // beside:>3} {''.join(row)}")
    seen = [name for name in PHASES if any(bar.phase == name for lane in lanes for bar in lane)]
    meaning = ", ".join(f"{name} {PHASES[name]}" for name in seen)
    return "\n".join([*rows, f"    {width} letters are {seconds_text(finish)}; {meaning}"])


def lanes_svg(lanes: Lanes, beside: int = 1) -> str:
    """Return lanes as an SVG picture without script or style sheet; ``beside`` as in ``lanes_text``."""
    finish = _finish(lanes)
    width, height = WIDTH * UNIT, len(lanes) * (ROW + GAP) + 24
    scale = width / finish
    named = sum(map(len, lanes)) <= MOST_NAMED
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + width + 4} {height}" '
        'font-family="sans-serif" font-size="11" role="img" aria-label="order of the pipeline">'
    ]
    for number, lane in enumerate(lanes):
        top = number * (ROW + GAP)
        own = sorted({bar.stage for bar in lane})
        parts.append(
            f'<text x="0" y="{top + ROW - 7}" fill="currentColor">worker {number // beside}</text>'
        )
        parts.append(
            f'<rect x="{LEFT}" y="{top}" width="{width}" height="{ROW}" fill="#8884" rx="2"/>'
        )
        for bar in lane:
            left, wide = LEFT + bar.start * scale, (bar.end - bar.start) * scale
            label = f"{PHASES[bar.phase]} of microbatch {bar.microbatch} on stage {bar.stage}"
            shade = 1 - 0.4 * own.index(bar.stage) / max(1, len(own) - 1)
            parts.append(
                f'<rect x="{left:.2f}" y="{top}" width="{max(wide - 0.5, 0.1):.2f}" height="{ROW}" '
                f'fill="{COLOURS[bar.phase]}" fill-opacity="{shade:.2f}"><title>{html.escape(label)}</title></rect>'
            )
            if named and wide >= 7 * len(str(bar.microbatch)) + 2:
                parts.append(
                    f'<text x="{left + wide / 2:.2f}" y="{top + ROW - 7}" fill="#fff" '
                    f'text-anchor="middle">{bar.microbatch}</text>'
                )
    left = LEFT
    for phase, name in PHASES.items():
        if any(bar.phase == phase for lane in lanes for bar in lane):
            y = height - 16
            parts.append(
                f'<rect x="{left}" y="{y}" width="12" height="12" fill="{COLOURS[phase]}"/>'
            )
            parts.append(f'<text x="{left + 16}" y="{y + 10}" fill="currentColor">{name}</text>')
            left += 130
    parts.append(
        f'<text x="{LEFT + width}" y="{height - 6}" text-anchor="end" fill="currentColor">'
        f"{html.escape(seconds_text(finish))}</text></svg>"
    )
    return "\n".join(parts)


def lanes_of(program: Program, timeline: Timeline) -> Lanes:
    """Return what the devices of every set of meshes compute when: each microbatch's forward and
    backward from its first instruction to its last. Of a pipeline without a flush it is that of some minibatches, one a period."""
    splits = program.strategy.pipeline.splits_backward
    spans: dict[tuple[frozenset[int], int, str, int], tuple[float, float]] = {}
    for index in np.flatnonzero(np.isin(program.kind, list(COMPUTES)) & (program.microbatch >= 0)):
        mesh = int(program.group[index])
        devices = frozenset(program.meshes[mesh].devices)
        phase = COMPUTES[Kind(int(program.kind[index]))]
        phase = "I" if phase == "B" and splits else phase
        key = devices, mesh, phase, int(program.microbatch[index])
        start, end = float(timeline.working_from[index]), float(timeline.end[index])
        if not math.isnan(start):
            before = spans.get(key, (start, end))
            spans[key] = min(before[0], start), max(before[1], end)
    lanes: dict[frozenset[int], list[Bar]] = {}
    pipeline, period = program.strategy.pipeline, timeline.step_seconds
    for (devices, mesh, phase, microbatch), (start, end) in spans.items():
        for number in range(1 if pipeline.is_flushed else MINIBATCHES):
            own, late = number * pipeline.num_microbatches + microbatch, number * period
            bar = Bar(mesh, phase, own, start + late, end + late)
            lanes.setdefault(devices, []).append(bar)
    return [sorted(lane, key=lambda bar: bar.start) for lane in lanes.values()]


def _finish(lanes: Lanes) -> float:
    return max((bar.end for lane in lanes for bar in lane), default=0.0) or 1.0
