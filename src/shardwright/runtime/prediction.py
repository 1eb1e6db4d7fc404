"""The weights that a stage is expected to have some updates from now.

An update repeats the direction of the one before, as far as anybody can know: W - s * eta * D (SpecTrain, Chen et
al., 2018; PipeOptim, Guan et al., 2023). D is what the optimizer's state says of it, by its own rule. Or it
decays as momentum does without new gradients, or is the difference of the last two weights over eta, which needs no
rule. Buffers are no weights, and are never predicted.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwright.core.program import Transform
from shardwright.core.staleness import COURSES, PREDICTS, REMAINS, Extrapolation, Staleness
from shardwright.errors import InputError
from shardwright.runtime.forecast import Forecasts
from shardwright.runtime.interpreter import Machine
from shardwright.runtime.outputs import counts
from shardwright.runtime.randomness import Clock
from shardwright.runtime.store import Store
from shardwright.runtime.waiting import Action

Entry = Mapping[str, Any]  # of an optimizer's state, or one of its groups
Row = tuple[int, Tensor, nn.Parameter]  # of a version


class Motion(NamedTuple):
    """What an optimizer's state says of its next steps: along what they go, how much of that is left after a step
    without a gradient, and which share of the weights a step takes by decoupled decay, in learning rates."""

    direction: Tensor
    memory: float
    decay: float = 0.0


def _momentum(state: Entry, group: Entry) -> Motion | None:
    """SGD with momentum, dampened or Nesterov's: with equal gradients its buffer is what every step takes, and
    weight decay is in it."""
    buffer = state.get("momentum_buffer")
    return None if buffer is None else Motion(buffer, group["momentum"])


def _adam(state: Entry, group: Entry) -> Motion | None:
    """Adam and AdamW, whose decoupled decay shrinks the weights before each of the steps."""
    taken = float(state.get("step", 0.0))
    if taken == 0:
        return None
    first, second = group["betas"]
    squares = state["max_exp_avg_sq"] if group["amsgrad"] else state["exp_avg_sq"]
    root = (squares.sqrt() / math.sqrt(1 - second**taken)).add_(group["eps"])
    direction = state["exp_avg"] / (1 - first**taken) / root
    is_apart = group.get("decoupled_weight_decay", False)
    return Motion(direction, first, group["weight_decay"] if is_apart else 0.0)


RULES: dict[type[torch.optim.Optimizer], Callable[[Entry, Entry], Motion | None]] = {
    torch.optim.SGD: _momentum,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adam,
}


def check_prediction(
    optimizer: torch.optim.Optimizer, staleness: Staleness, how: Extrapolation
) -> None:
    """Refuse optimizers whose next steps nobody can tell from their state, and ways of prediction that there are not."""
    if how.course not in COURSES or how.limit < 0 or not math.isfinite(how.limit):
        raise InputError(
            f"weights are predicted along {', '.join(COURSES)}, and as far as a limit of 0 (none) or more allows, but "
            f"the course is {how.course!r} and the limit {how.limit}; choose others"
        )
    if staleness not in PREDICTS:
        if how != Extrapolation():
            raise InputError(
                f"how weights are predicted is of plans that predict ({', '.join(sorted(PREDICTS))}), but this "
                f"one has staleness {staleness}; leave out the extrapolation"
            )
        return
    if how.course == "difference":
        return
    named = "torch.optim's SGD with momentum, Adam and AdamW"
    if type(optimizer) not in RULES:
        raise InputError(
            f"{staleness} predicts weights by the optimizer's rule, which is known of {named}, not of "
            f"{type(optimizer).__name__}; use one of these, predict along differences, or use a plan that stashes "
            "weights"
        )
    if any(group.get("momentum") == 0 for group in optimizer.param_groups):
        raise InputError(
            f"{staleness} predicts weights from the optimizer's momentum, but momentum is 0; set it, "
            "predict along differences, or use a plan that stashes weights"
        )


class Oracle:
    """Tells what parameters are expected to be, at the current learning rates, and what they were.

    Since the pipeline was empty it remembers what they were before their last update, if it goes by that, and at
    forwards before; how updates went on average; and what all microbatches of a minibatch have in common (``shared``, by
    half, 1 for backward): a rank has one stage.
    """

    def __init__(self, clock: Clock, how: Extrapolation) -> None:
        self.how, self._clock = how, clock
        self._since = -1  # the first minibatch of those whose updates are remembered
        self._before: dict[nn.Parameter, Tensor] = {}
        self._average: dict[nn.Parameter, Tensor] = {}
        self._remains = 0.0  # of the average, at each update
        self._updates = 0
        self.past: deque[list[Tensor]] = deque()
        self.kept: list[Tensor] = []  # as they were before the last update
        self.shared: dict[int, list[Tensor]] = {}

    def about_to_update(self, parameters: Iterable[nn.Parameter]) -> None:
        """Be told of an update."""
        if self.how.course == "difference":
            before = self._remembered()
            before.update((one, one.detach().clone()) for one in parameters)

    def _remembered(self) -> dict[nn.Parameter, Tensor]:
        if self._since != self._clock.first:
            self._since = self._clock.first
            self._updates = 0
            for held in (self._before, self._average, self.past, self.kept, self.shared):
                held.clear()
        return self._before

    def buffer(self, weights: Sequence[Tensor]) -> None:
        """Keep weights that an update is about to change, in place of those of the update before."""
        self._remembered()
        self._updates += 1
        if not self.kept:
            self.kept = [torch.empty_like(one) for one in weights]
        for held, one in zip(self.kept, weights, strict=True):
            held.copy_(one.detach())

    def buffered(self, weights: Sequence[Tensor], minibatch: int) -> Sequence[Tensor]:
        """Return the weights of one update before a minibatch's own (PipeDream-2BW), or the first ones: as they are, or
        were before the last update."""
        self._remembered()
        own = max(minibatch - self._clock.first - 1, 0)
        return weights if own == self._updates else self.kept

    def about_to_average(self, parameters: Iterable[nn.Parameter], lag: int) -> None:
        """Be told of an update of a stage whose average lasts so many."""
        self._remains = REMAINS ** (1 / lag)
        before = self._remembered()
        before.update((one, one.detach().clone()) for one in parameters)

    def updated(self) -> None:
        """Take an update into the average of how they went, if there is one."""
        if not self._remains:
            return
        for parameter, before in self._before.items():
            step = (parameter.detach() - before).mul_(1 - self._remains)
            if (average := self._average.get(parameter)) is not None:
                step.add_(average, alpha=self._remains)
            self._average[parameter] = step
        self._before.clear()

    def before(self, weights: Sequence[Tensor], updates: int) -> list[Tensor]:
        """Return, at the forward of every minibatch, the weights that there were so many updates before."""
        self._remembered()
        self.past.append([one.detach().clone() for one in weights])
        if len(self.past) > updates + 1:
            self.past.popleft()
        return self.past[0]

    def expected(
        self, optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter], steps: int
    ) -> list[Tensor]:
        """Return parameters as they are expected to be so many updates later, in memory of their own; as they
        are where nothing updated them yet."""
        groups = {one: group for group in optimizer.param_groups for one in group["params"]}
        return [self._expected(optimizer, one, groups[one], steps) for one in parameters]

    def _expected(
        self, optimizer: torch.optim.Optimizer, parameter: nn.Parameter, group: Entry, steps: int
    ) -> Tensor:
        weights, rate = parameter.detach(), float(group["lr"])
        if self.how.course == "difference":
            before = self._remembered().get(parameter)
            if steps == 0 or before is None:
                return weights.clone()
            return weights.add(self._limited(weights - before, rate), alpha=steps)
        state = optimizer.state.get(parameter, {})
        motion = RULES[type(optimizer)](state, group) if steps and state else None
        if motion is None:
            return weights.clone()
        left = motion.memory if self.how.course == "decaying" else 1.0
        kept = 1 - rate * motion.decay
        way = sum(left**step * kept ** (steps - step) for step in range(1, steps + 1))
        start = weights if kept == 1 else kept**steps * weights
        return torch.sub(start, self._limited(motion.direction, 1.0), alpha=rate * way)

    def versions(
        self, optimizer: torch.optim.Optimizer, rows: Sequence[Row], steps: int
    ) -> list[Tensor]:
        """Return the parameters of rows so many updates later, or (below 0) as they are estimated to have been before, in
        the dtypes in which they are used."""
        if steps < 0:
            return [self._estimated(one, steps).to(raw.dtype) for _, raw, one in rows]
        made = self.expected(optimizer, [one for _, _, one in rows], steps)
        return [one.to(raw.dtype) for one, (_, raw, _) in zip(made, rows, strict=True)]

    def _estimated(self, parameter: nn.Parameter, steps: int) -> Tensor:
        """Go back along the average of updates (PipeMare's T2)."""
        weights, average = parameter.detach(), self._average.get(parameter)
        return weights.clone() if average is None else weights.add(average, alpha=steps)

    def _limited(self, step: Tensor, unit: float) -> Tensor:
        most = self.how.limit * unit
        return step.clamp(-most, most) if self.how.limit else step


def versioned(
    transform: Transform,
    machine: Machine,
    moment: tuple[int, int],
    optimizer: Callable[[], torch.optim.Optimizer] | None,
    oracle: Oracle,
    forecasts: Forecasts,
) -> Action:
    """Return the action that writes versions of parameters for a minibatch, ``moment``: its (shift,
    instance). Without an optimizer they are the parameters as they are."""
    (shift, instance), store, clock = moment, machine.store, machine.clock
    rows = _rows(transform, machine, instance)
    own = [raw for _, raw, _ in rows]
    number = _numbers(transform)
    if optimizer is None or not any(number[one] for one in ("buffered", "copies", "shares")):
        return partial(_write, store, rows, own)
    pieces = machine.program.strategy.pipeline.num_microbatches
    lent = _lent(
        number, own, oracle, lambda: clock.minibatch(shift), instance % pieces == pieces - 1
    )
    if lent is not None:
        return lambda: _write(store, rows, lent())
    told = None if number["backward"] else _told(transform, machine, rows)

    def predict() -> None:
        minibatch = clock.minibatch(shift)
        steps = _steps(number, minibatch - clock.first)
        weights = oracle.versions(optimizer(), rows, steps)
        _write(store, rows, weights)
        if pieces > 1:
            oracle.shared[number["backward"]] = weights
        if told is not None:
            forecasts.see(minibatch, _written(store, told), steps)

    return predict


def _written(store: Store, rows: Sequence[Row]) -> list[tuple[nn.Parameter, Tensor | None]]:
    return [(parameter, store.data[slot]) for slot, _, parameter in rows]


def _numbers(transform: Transform) -> dict[str, int]:
    return {name: transform.count(name) for name, _ in transform.constants}


def _lent(
    number: Mapping[str, int],
    own: Sequence[Tensor],
    oracle: Oracle,
    minibatch: Callable[[], int],
    is_last: bool,
) -> Callable[[], Sequence[Tensor]] | None:
    """Return what gives versions that were made already, None where they are to be predicted; ``is_last``: of those that
    share them."""
    if number["buffered"]:
        return lambda: oracle.buffered(own, minibatch())
    if behind := number["behind"]:
        return lambda: oracle.before(own, behind)
    if number["shares"]:
        take = oracle.shared.pop if is_last else oracle.shared.__getitem__
        return lambda: take(number["backward"])
    return None


def _steps(number: Mapping[str, int], begun: int) -> int:
    """Return how many updates ahead a version is for the minibatch before which so many entered an empty pipeline."""
    lag = number["lag"]
    return number["forward"] + (min(begun, lag) if lag >= 0 else -min(begun, -lag))


def buffering(transform: Transform, machine: Machine, oracle: Oracle) -> Action:
    """Return the action that keeps parameters as they are before their update, or that averages how it goes."""
    lag = _numbers(transform)["averages"]
    parameters = machine.parameters
    if not lag:
        own = [parameters.raw[one] for one in transform.reads]
        return lambda: oracle.buffer(own)
    trained = _trained(machine)
    masters = [trained[machine.program.values[one].tensor] for one in transform.reads]
    return lambda: oracle.about_to_average(masters, lag)


def _trained(machine: Machine) -> dict[int, nn.Parameter]:
    """Return what is updated of a graph's parameters."""
    values = machine.program.values
    return {values[one.value].tensor: one.parameter for one in machine.parameters.masters}


def _told(transform: Transform, machine: Machine, rows: Sequence[Row]) -> list[Row]:
    """Return the versions whose errors this device tells: of replicas one does."""
    site = machine.sites[transform.mesh]
    return list(compress(rows, [counts(machine.program, one, site) for one in transform.reads]))


def _write(store: Store, rows: Sequence[Row], weights: Sequence[Tensor]) -> None:
    for (slot, _, _), version in zip(rows, weights, strict=True):
        store.data[slot] = version


def _rows(transform: Transform, machine: Machine, instance: int) -> list[Row]:
    """Return by version its slot, the parameter in use, and the one that is updated."""
    values, parameters, trained = machine.program.values, machine.parameters, _trained(machine)
    return [
        (machine.store.slot(new, instance), parameters.raw[old], trained[values[old].tensor])
        for old, new in zip(transform.reads, transform.writes, strict=True)
    ]
