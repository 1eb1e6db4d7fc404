"""Why a plan is as it is: what else could have been decided, and what more of everything would buy.

Made by the planner, shown by reports. Seconds are those of one step, bytes those of the fullest device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One decision and its runner-up: what the best plan that decides otherwise would cost.

    ``added_seconds`` and ``added_bytes`` compare the best plans with either choice in the additive
    model, everything else chosen anew. ``step_seconds`` and ``peak_bytes`` are those of the runner-up,
    simulated, NaN where it was not. ``count`` equal layers share the decision.
    """

    what: str
    chosen: str
    runner_up: str
    added_seconds: float
    added_bytes: float
    count: int = 1
    step_seconds: float = math.nan
    peak_bytes: float = math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowPrice:
    """What the step would take if there were more of something.

    ``label`` names the plan where it is another one; otherwise this plan is simulated again.
    """

    what: str
    step_seconds: float
    label: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxation:
    """A change of what was asked under which a plan was found: the smallest one tried that helps.

    ``option`` is how to ask for it on the command line, empty where that takes other hardware.
    ``step_seconds``, ``peak_bytes`` and ``label`` are the found plan's, which only shows that one
    exists; the best may be faster.
    """

    what: str
    option: str
    label: str
    step_seconds: float
    peak_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasons:
    """All that speaks for a plan.

    ``byte_seconds``: the seconds that one more byte per device is worth at most, by the additive
    model's dual at this plan's memory; 0 where memory does not bind, NaN where the plan is no point
    of that model. ``notes`` say what could not be priced.
    """

    decisions: tuple[Decision, ...]
    prices: tuple[ShadowPrice, ...]
    byte_seconds: float
    notes: tuple[str, ...] = ()
