"""Advice on settings of plain PyTorch, measured on this machine: attention, memory format, recomputation, compiling."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

from shardwright.core.advice import Advice, Curve
from shardwright.core.plan import TOLD_APART
from shardwright.report.units import seconds_text
from shardwright.verbs.advice.requests import SettingsRequest
from shardwright.verbs.request import Watch
from shardwright.verbs.stalls import blaming

if TYPE_CHECKING:
    from shardwright.runtime.race import Laps


def advise_settings(model: str, request: SettingsRequest, watch: Watch | None = None) -> Advice:
    """Run a model's forward and backward by each setting in turns beside the plain step, and say what is faster."""
    import torch

    from shardwright.runtime.capture import load_model
    from shardwright.runtime.race import Rules
    from shardwright.runtime.settings import PLAIN, measure

    watch = watch or Watch()
    source = load_model(model)
    batch = request.batch or source.own_batch_size()
    rules = Rules(turns=request.turns, steps=2, budget_seconds=request.seconds)
    with blaming(f"the model {model}", "see that its forward and backward run by themselves"):
        laps, refused = measure(
            source, batch, request.seq, rules, compiles=request.compile,
            tell=lambda turns: watch.tell("running in turns", turns / request.turns),
        )  # fmt: skip
    plain = laps[PLAIN]
    found = sorted(laps.items(), key=lambda pair: pair[1].seconds)
    where = (
        torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "CPU"
    )
    return Advice(
        title="Settings, forward and backward (measured)",
        answers=(_answer(found, plain), *(f"{name} does not run here: {why}" for name, why in refused.items())),
        inputs=(
            ("model", model),
            ("batch", f"{batch:,} samples"),
            ("device", f"{where}, {torch.get_num_threads()} thread(s)"),
            ("measured", f"{plain.num_steps} steps in {len(plain.turns)} turns each"),
        ),
        assumptions=(
            "Forward and backward only: the update is the same by all of them.",
            f"Steps that differ by less than {TOLD_APART:.0%} and their spread are the same.",
            "Recomputation is there for memory: `advise microbatch --recompute` says what it frees.",
        ),
        sources=(f"measured here in turns, torch {torch.__version__}; spread: half the distance of the quartiles of "
                 "turns",),
        columns=("setting", "step", "spread", "against plain"),
        rows=tuple(
            (name, seconds_text(one.seconds), f"±{one.spread / one.seconds:.1%}",
             f"{plain.seconds / one.seconds:.2f}x")
            for name, one in found
        ),
        curves=(
            Curve(
                title="Steps turn by turn",
                across="turn",
                up="ms",
                lines=tuple(
                    (name, tuple((float(k), 1e3 * min(turn)) for k, turn in enumerate(one.turns, 1)))
                    for name, one in found
                ),
            ),
        ),
        values={
            "settings": [
                {"name": name, "seconds": one.seconds, "spread_seconds": one.spread}
                for name, one in found
            ],
            "refused": refused,
        },
    )  # fmt: skip


def _answer(found: list[tuple[str, Laps]], plain: Laps) -> str:
    name, best = found[0]
    if not best.measured.told_apart(plain.measured):
        return "Leave it as it is: nothing is faster by more than measuring can tell."
    return f"Take {name}: {plain.seconds / best.seconds:.2f} times as fast as the plain step."
