"""Pipelines that are never flushed: when a stage works for which minibatch, and on which weights.

Time is counted in *slots*. In each a microbatch enters, another leaves, and every stage runs one forward, of a
newer one, and behind it one backward, of an older one (PipeDream's 1F1B). A tensor travels over two stages in a slot.
So a microbatch that enters in slot i has its forward on stage k of N in slot i + ceil(k / 2) and its backward in slot
i + N - 1 - floor(k / 2). A minibatch is m of them, and behind the backward of its last one a stage updates its own
parameters. A *period* is m slots. Where a minibatch is one microbatch a stage is updated N - 1 - k times between its
forward and its backward; where there are at least as many of them as stages, once at most.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

Staleness = Literal[
    "none", "stale", "stash", "stash-vertical", "spectrain-v1", "spectrain-v2", "pipeoptim",
    "pipemare", "2bw", "xpipe",
]  # fmt: skip

# What each is, as people read it.
TITLES: dict[Staleness, str] = {
    "none": "synchronous",
    "stale": "asynchronous, newest weights",
    "stash": "asynchronous, stashed weights (PipeDream)",
    "stash-vertical": "asynchronous, stashed weights of one update on all stages (PipeDream's vertical sync)",
    "spectrain-v1": "asynchronous, weights predicted for forward and backward (SpecTrain)",
    "spectrain-v2": "asynchronous, weights predicted once (SpecTrain)",
    "pipeoptim": "asynchronous, weights predicted for forward (PipeOptim)",
    "pipemare": "asynchronous, newest weights, backward on what forward's were estimated to be (PipeMare)",
    "2bw": "asynchronous, weights of one update before, double-buffered (PipeDream-2BW)",
    "xpipe": "asynchronous, weights predicted once for all microbatches of a minibatch (XPipe)",
}
# What that means for training, as a plan says it.
MEANS: dict[Staleness, str] = {
    "none": "",
    "stale": (
        "a batch's forward and backward see different weights, and gradients are up to one update per stage "
        "behind late: losses are not those of synchronous training, and may need a smaller learning rate"
    ),
    "stash": (
        "gradients are those of the weights that the batch's forward saw, and late by one update per stage behind: "
        "losses are not those of synchronous training, and may need a smaller learning rate"
    ),
    "stash-vertical": (
        "a batch sees on all stages the weights of one update, and its gradients are late by one update per stage "
        "behind the first: losses are not those of synchronous training, and may need a smaller learning rate"
    ),
    "pipemare": (
        "a batch's backward sees an estimate of the weights that its forward saw, and gradients are late by one update "
        "per stage behind: losses are not those of synchronous training, and may need a smaller learning rate"
    ),
    "2bw": (
        "a batch sees on all stages the weights of one update, and its gradients are one update late, whatever the "
        "number of stages: losses are not those of synchronous training, and may need a smaller learning rate"
    ),
    "xpipe": (
        "batches run on weights predicted from the optimizer's momentum, and gradients are one update late: losses "
        "are near those of synchronous training while updates change slowly, not equal"
    ),
    **dict.fromkeys(
        ("spectrain-v1", "spectrain-v2", "pipeoptim"),
        "batches run on weights predicted from the optimizer's momentum, and gradients are late by one update "
        "per stage behind: losses are near those of synchronous training while updates change slowly, not equal",
    ),
}
ASYNCHRONOUS: tuple[Staleness, ...] = get_args(Staleness)[1:]
PREDICTS: frozenset[Staleness] = frozenset({"spectrain-v1", "spectrain-v2", "pipeoptim", "xpipe"})
# Those that update once for many microbatches, at least as many as stages.
ACCUMULATES: frozenset[Staleness] = frozenset({"2bw", "xpipe"})
# Along what weights are predicted.
Course = Literal["last", "decaying", "difference"]
COURSES: tuple[Course, ...] = get_args(Course)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extrapolation:
    """How weights are predicted. ``course``: along what the optimizer's ``last`` step took, along that ``decaying`` with
    each step, as momentum does where no gradients come, or along the ``difference`` that the last update made.
    ``limit``: an element moves by so many learning rates a step at most; 0: as far as it comes.
    """

    course: Course = "last"
    limit: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """On which weights a stage runs a minibatch.

    Its forward runs on those that the stage is expected to have ``forward + lag`` updates later; while the pipeline
    fills, the minibatch is the i-th (from 0) since it was empty, and there are ``forward + min(i, lag)``. Its backward
    runs on those of its forward where ``backward`` is None, else on those that are expected so many
    updates later than they are by then; or, where ``regress`` is more than 0, on those that they are estimated to have been
    ``min(i, regress)`` updates before. ``between`` both halves the stage is updated so often at most. Where ``behind``
    is more than 0 forward runs on those that it had so many updates before, or had when the pipeline was empty.
    ``buffered``: both halves of all microbatches run on the weights of one update before the minibatch's own, which are the
    newest or, behind that update, kept.
    """

    forward: int
    lag: int
    backward: int | None
    between: int
    behind: int = 0
    regress: int = 0
    buffered: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether both halves run on the parameters as they are, between which nothing updates them."""
        return self.backward is None and self.forward == self.between == self.behind == 0


def forward_slot(stage: int) -> int:
    """Return how many slots after a microbatch entered a stage runs its forward."""
    return (stage + 1) // 2


def backward_slot(stage: int, stages: int) -> int:
    """Return how many slots after a microbatch entered a stage, of so many, runs its backward."""
    return stages - 1 - stage // 2


def lag(stage: int, stages: int, microbatches: int = 1) -> int:
    """Return how many minibatches have begun on a stage, of so many, and not updated it when the next begins."""
    return (stages - 2 - stage) // microbatches + 1


def lateness(staleness: Staleness, stages: int, microbatches: int) -> int:
    """Return by how many updates of its stage a gradient is late at most."""
    if staleness == "none" or stages == 1:
        return 0
    return lag(0, stages, microbatches)


def outlook(staleness: Staleness, stage: int, stages: int, microbatches: int = 1) -> Outlook:
    """Return on which weights a stage, of so many, runs its minibatches."""
    between = stages - 1 - stage
    if staleness == "2bw":
        return Outlook(forward=0, lag=0, backward=0, between=1, buffered=True)
    if staleness == "xpipe":
        return _of_microbatches(stage, stages, microbatches)
    aims = stage // 2 if staleness == "spectrain-v1" else 0  # beyond the stage's own backward
    ahead = between if staleness in PREDICTS else 0
    # Where nothing is updated between both halves they run on the same weights anyway.
    keeps = staleness in ("stash", "stash-vertical", "spectrain-v2") or between == 0
    return Outlook(
        forward=aims,
        lag=ahead,
        backward=None if keeps else aims,
        between=between,
        # The first stage, whose newest weights all are to have, is that much further behind.
        behind=stage if staleness == "stash-vertical" else 0,
        regress=between if staleness == "pipemare" else 0,
    )


def _of_microbatches(stage: int, stages: int, microbatches: int) -> Outlook:
    """Return on which weights XPipe runs a minibatch: those expected, when the first microbatch of it has its forward, or
    its backward, for the slot in which the last one leaves the pipeline, to the nearest update."""
    leaves = microbatches - 1 + stages - 1
    updates = [
        (2 * (leaves - slot) + microbatches) // (2 * microbatches)
        for slot in (forward_slot(stage), backward_slot(stage, stages))
    ]
    under_way = lag(stage, stages, microbatches)
    return Outlook(
        forward=updates[0] - under_way, lag=under_way, backward=updates[1], between=under_way
    )


# PipeMare: what is left of an update in the average of a stage's updates, after as many as lie between a forward and
# its backward. Their D.
REMAINS = math.exp(-2)


def rate_share(lag: int, update: int, annealing: int) -> float:
    """Return which share of the learning rate a stage takes in its update number ``update`` (PipeMare's T1): 1 / ``lag`` at
    first, all of it after ``annealing`` updates, and of its logarithm linearly in between."""
    left = max(1 - update / annealing, 0.0) if annealing else 0.0
    return max(lag, 1) ** -left


def versions(staleness: Staleness, stage: int, stages: int, microbatches: int = 1) -> int:
    """Return how many copies of its parameters, besides these, a stage holds at most."""
    look = outlook(staleness, stage, stages, microbatches)
    if look.is_plain or staleness == "stale":
        return 0
    if look.buffered:
        return 1
    if staleness in ("pipemare", "xpipe"):  # the average of updates; forward's beside backward's
        return 2
    return stages - stage + look.behind if look.backward is None else 1
