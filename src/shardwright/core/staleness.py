"""Pipelines that are never flushed: when a stage works for which minibatch, and on which weights.

Time is counted in *periods*. In each a minibatch enters, another leaves, and every stage runs one forward, of a
newer one, and behind it one backward, of an older one, and then updates its own parameters (PipeDream's 1F1B).
A tensor travels over two stages in a period. So a minibatch that enters in period i has its forward on stage k
of N in period i + ceil(k / 2) and its backward in period i + N - 1 - floor(k / 2); between them that
stage's parameters are updated N - 1 - k times.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Staleness = Literal[
    "none", "stale", "stash", "stash-vertical", "spectrain-v1", "spectrain-v2", "pipeoptim"
]

# What each is, as people read it.
TITLES: dict[Staleness, str] = {
    "none": "synchronous",
    "stale": "asynchronous, newest weights",
    "stash": "asynchronous, stashed weights (PipeDream)",
    "stash-vertical": "asynchronous, stashed weights of one update on all stages (PipeDream's vertical sync)",
    "spectrain-v1": "asynchronous, weights predicted for forward and backward (SpecTrain)",
    "spectrain-v2": "asynchronous, weights predicted once (SpecTrain)",
    "pipeoptim": "asynchronous, weights predicted for forward (PipeOptim)",
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
    **dict.fromkeys(
        ("spectrain-v1", "spectrain-v2", "pipeoptim"),
        "batches run on weights predicted from the optimizer's momentum, and gradients are late by one update "
        "per stage behind: losses are near those of synchronous training while updates change slowly, not equal",
    ),
}
ASYNCHRONOUS: tuple[Staleness, ...] = get_args(Staleness)[1:]
PREDICTS: frozenset[Staleness] = frozenset({"spectrain-v1", "spectrain-v2", "pipeoptim"})
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
    updates later than they are by then. ``between`` both halves the stage is updated so often. Where ``behind``
    is more than 0 forward runs on those that it had so many updates before, or had when the pipeline was empty.
    """

    forward: int
    lag: int
    backward: int | None
    between: int
    behind: int = 0

    @property
    def is_plain(self) -> bool:
        """Whether both halves run on the parameters as they are, between which nothing updates them."""
        return self.backward is None and self.forward == self.between == self.behind == 0


def forward_shift(stage: int) -> int:
    """Return how many periods after a minibatch entered a stage runs its forward."""
    return (stage + 1) // 2


def backward_shift(stage: int, stages: int) -> int:
    """Return how many periods after a minibatch entered a stage, of so many, runs its backward."""
    return stages - 1 - stage // 2


def outlook(staleness: Staleness, stage: int, stages: int) -> Outlook:
    """Return on which weights a stage, of so many, runs its minibatches."""
    between = stages - 1 - stage
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
    )


def versions(staleness: Staleness, stage: int, stages: int) -> int:
    """Return how many copies of its parameters, besides these, a stage holds at most."""
    look = outlook(staleness, stage, stages)
    if look.is_plain or staleness == "stale":
        return 0
    return stages - stage + look.behind if look.backward is None else 1
