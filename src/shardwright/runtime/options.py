"""How a Program is run, beside what it says itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from shardwright.core.graph import OperatorGraph
from shardwright.core.program import Program
from shardwright.core.staleness import Extrapolation
from shardwright.core.strategy import Strategy
from shardwright.errors import InputError
from shardwright.runtime.scaling import Scaling
from shardwright.runtime.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How to run a Program.

    ``device``: torch device of this rank; None: its own of the type that is planned for, as ``build``
    finds out, else the CPU. ``seed`` of dropout.
    ``max_norm``: bound of the global gradient norm, for plans that clip (None: the plan's own).
    ``check_finite`` raises before the update when the loss is NaN or infinite. ``scaling`` of the loss; None: by the usual
    rules where the plan is for float16, else none. ``timeout``: seconds a collective may take.
    ``world``: the ranks, ``torch.distributed`` where it is None. ``releases``: the module is the
    executor's to empty; its trained parameters go to the meta device once shards are cut.
    ``noise_decay``: of the averages of the gradient noise scale (``Executor.noise``); None: it is not measured.
    ``forecast_every``: so many batches, at least one more than stages, predicted weights are looked at again
    (``Executor.forecast``); 0: never. Their stages then hold two more copies of them for a while.
    ``extrapolation``: how an asynchronous pipeline predicts weights; along differences a stage holds another copy of
    them. ``rate_annealing``: PipeMare's stages begin with their learning rates divided by how many updates their gradients
    are late, and have all of them after so many; 0: from the first.
    ``lower`` turns a graph and a strategy into a Program: what a plan whose densities warm up needs between steps.
    """

    device: torch.device | str | None = None
    seed: int = 0
    max_norm: float | None = None
    check_finite: bool = False
    scaling: Scaling | None = None
    timeout: float = 60.0
    world: World | None = None
    releases: bool = False
    noise_decay: float | None = None
    forecast_every: int = 0
    extrapolation: Extrapolation = field(default_factory=Extrapolation)
    rate_annealing: int = 0
    lower: Callable[[OperatorGraph, Strategy], Program] | None = None


def check_lowers(program: Program, options: RunOptions) -> None:
    """Refuse to warm up without what makes other Programs."""
    steps = program.strategy.gradient_sync.feedback.warm_up
    if steps and options.lower is None:
        raise InputError(
            f"for each density of a warm-up, {steps} steps each, there is another Program, but nothing lowers "
            "one; give RunOptions(lower=shardwright.planner.lower.lower), as build does"
        )
