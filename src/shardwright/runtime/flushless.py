"""A rank's share of a pipeline that is never flushed, period after period.

In a period a minibatch enters, and each of the rank's instructions works for the minibatch that its shift says,
if there is one, in the order of their positions. Nobody waits for all ranks: what all are told, the loss, is on its way while the next
periods run.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from shardwright.core.program import Kind, Program
from shardwright.errors import RunError
from shardwright.runtime import outputs
from shardwright.runtime.forecast import Forecasts
from shardwright.runtime.hostcopy import HostCopy
from shardwright.runtime.interpreter import Compiled, Compiler, Machine
from shardwright.runtime.loss import LossSum
from shardwright.runtime.messages import Exchange
from shardwright.runtime.status import INTERRUPTION
from shardwright.runtime.transfers import Receive
from shardwright.runtime.waiting import Action

Step = tuple[int, int, Action]  # an action's shift, and its instruction


@dataclass(frozen=True, slots=True)
class Left:
    """The loss (0-d, float64, equal on all ranks) of a batch that has left the pipeline; ``number`` counts batches
    from 1, over the whole training."""

    number: int
    loss: Tensor


class _Told(NamedTuple):
    """What all ranks are told at the end of a period: of which minibatch (-1: none), and what."""

    period: int
    minibatch: int
    sums: HostCopy


class _Ahead(NamedTuple):
    """A receive that is asked for ahead of its turn, in the same period or so much ``later``."""

    index: int
    receive: Exchange
    later: int


class Flow:
    """The pipeline as this rank runs it. ``clock.step`` is the period, and the number of the minibatch
    that enters."""

    def __init__(
        self,
        machine: Machine,
        compiler: Compiler,
        indices: Sequence[int],
        loss: LossSum,
        forecasts: Forecasts,
    ) -> None:
        program, store = machine.program, machine.store
        self.machine, self.compiler, self.loss = machine, compiler, loss
        self._forecasts = forecasts
        lasting = frozenset(store.slot(program.loss, one) for one in range(program.ring))
        self._posted: set[int] = set()  # receives of the period to come
        own = set(indices)
        turns = compiler.compile_turns(
            [one for one in program.turns.tolist() if one in own], lasting
        )
        self._turns = [
            self._with_receives_ahead(one, turns[(at + 1) % len(turns)])
            for at, one in enumerate(turns)
        ]
        self._ring = program.under_way
        self._pieces = program.strategy.pipeline.num_microbatches
        self._leaves = _shift_of_loss(program)
        self._stream = torch.cuda.Stream(store.device) if store.device.type == "cuda" else None
        self._end = 0  # behind the last minibatch that entered
        self._is_empty = True
        self._told: deque[_Told] = deque()
        self._left: deque[Left] = deque()
        self._is_broken = False
        self.interrupted = False

    def close(self) -> None:
        """Let go of what holds process groups, as ``Executor.close`` does: the compiled instructions, and what
        compiled them."""
        self._turns.clear()
        del self.compiler

    def enter(
        self, fill: Callable[[int], None], walk: Callable[[int, Action], None]
    ) -> Left | None:
        """Run a period with a new minibatch, whose instance of inputs ``fill`` fills; return a loss that
        came out, if one did."""
        clock = self.machine.clock
        if self._is_broken:
            raise RunError(
                "a pipeline goes on where it was, but its last period failed; build another executor and "
                "load the last checkpoint",
                rank=self.machine.world.rank,
            )
        fill(clock.step % self._ring * self._pieces)
        if self._is_empty:
            clock.first = clock.step
        self._end, self._is_empty = clock.step + 1, False
        self._period(walk)
        return self._left.popleft() if self._left else None

    def drain(self, walk: Callable[[int, Action], None]) -> None:
        """Run periods until the pipeline is empty."""
        clock, end = self.machine.clock, self._end
        if self._is_empty or self._is_broken:
            return
        for _ in range(self._ring - 1):
            self._period(walk)
        self.compiler.let_go()
        while self._told:
            self._hear(self._told.popleft())
        clock.step, self._is_empty = end, True
        self._forecasts.clear()
        self.machine.store.clear()

    def leave(self) -> list[Left]:
        """Return the losses that nobody was told yet of what has left."""
        found = list(self._left)
        self._left.clear()
        return found

    def _with_receives_ahead(self, turn: Compiled, following: Compiled) -> list[Step]:
        """Return a turn's actions with their shifts, in which what comes from a stage for a microbatch is asked for as
        soon as all of the one before has come, in this turn or the one that follows: the sender need not wait for that.

        On GPUs a receive that is asked for is a kernel that runs until then.
        """
        program, found = self.machine.program, list[Step]()
        on_host = self.machine.store.device.type == "cpu"
        receives = {i: one for i, one in turn.exchanges.items() if isinstance(one, Receive)}
        nexts = self._asked_ahead(turn, receives, following) if on_host else {}
        for place, (index, action) in enumerate(turn.actions):
            run = action
            if nexts and index in receives and action == receives[index].issue:
                run = partial(self._ask, index, receives[index])
            found.append((program.shift_of(index), index, run))
            if place in nexts:
                run = partial(self._ask_ahead, nexts[place])
                found.append((program.shift_of(index), index, run))
        return found

    def _asked_ahead(
        self, turn: Compiled, receives: Mapping[int, Receive], following: Compiled
    ) -> dict[int, list[_Ahead]]:
        """Return the places in a turn's actions by which all has come that a stage sends for a microbatch, and what is
        asked for there."""
        program, by_sender = self.machine.program, dict[int, dict[int, list[int]]]()
        for index in receives:
            sender = program.messages[int(program.item[index])].mesh
            pieces = by_sender.setdefault(sender, {})
            pieces.setdefault(int(program.microbatch[index]), []).append(index)
        ends = {
            index: place
            for place, (index, action) in enumerate(turn.actions)
            if index in receives and action == receives[index].complete
        }
        found: dict[int, list[_Ahead]] = {}
        for pieces in by_sender.values():
            every = list(pieces.values())  # as they stand in the turn
            for own, coming in pairwise(every):
                found[_last(own, ends)] = [_Ahead(one, receives[one], 0) for one in coming]
            first = [_Ahead(one, following.exchanges[one], 1) for one in every[0]]
            found[_last(every[-1], ends)] = first
        return found

    def _ask(self, index: int, receive: Exchange) -> None:
        if index in self._posted:
            self._posted.remove(index)
        else:
            receive.issue()

    def _ask_ahead(self, coming: Sequence[_Ahead]) -> None:
        """Ask for what a minibatch is sent that is there for sure: it has entered."""
        clock = self.machine.clock
        for one in coming:
            minibatch = clock.minibatch(self.machine.program.shift_of(one.index)) + one.later
            if clock.first <= minibatch < self._end:
                self._posted.add(one.index)
                one.receive.issue()

    def _period(self, walk: Callable[[int, Action], None]) -> None:
        clock, first, end = self.machine.clock, self.machine.clock.first, self._end
        self.loss.seed(1.0)
        self._is_broken = True
        for shift, index, action in self._turns[clock.step % self._ring]:
            if first <= clock.step - shift < end:
                walk(index, action)
        self._tell(clock.step - self._leaves)
        clock.step += 1
        while self._told and self._told[0].period + self._ring - self._leaves < clock.step:
            self._hear(self._told.popleft())
        self._is_broken = False

    def _tell(self, minibatch: int) -> None:
        """Begin to tell all ranks a minibatch's loss, if it was just made, and whether to stop."""
        machine, program = self.machine, self.machine.program
        is_there = machine.clock.first <= minibatch < self._end
        site = machine.sites.get(program.values[program.loss].mesh)
        sums = torch.zeros(2, dtype=torch.float64, device=machine.store.device)
        if is_there and site is not None and outputs.counts(program, program.loss, site):
            place = minibatch % self._ring * self._pieces
            pieces = range(place, place + self._pieces)
            for slot in dict.fromkeys(machine.store.slot(program.loss, one) for one in pieces):
                held = machine.store.data[slot]
                sums[0] += torch.nan if held is None else held
        sums[1] = float(INTERRUPTION.requested)
        sums = torch.cat((sums, self._forecasts.tell())) if self._forecasts.every else sums
        copy = HostCopy(machine.world.all_reduce(sums), machine.store.device, self._stream)
        self._told.append(_Told(machine.clock.step, minibatch if is_there else -1, copy))

    def _hear(self, told: _Told) -> None:
        sums = told.sums.read()
        self.interrupted = bool(sums[1])
        if self._forecasts.every:
            self._forecasts.hear(told.period, sums[2:])
        if told.minibatch >= 0:
            self._left.append(Left(told.minibatch + 1, told.sums.tensor()[0]))


def _last(indices: Sequence[int], ends: Mapping[int, int]) -> int:
    return max(ends[index] for index in indices)


def _shift_of_loss(program: Program) -> int:
    """Return how many periods after a minibatch entered all of its loss is there."""
    assert program.shift is not None
    runs = program.group == program.values[program.loss].mesh
    return int(program.shift[runs & (program.kind == Kind.FORWARD)].max())


def require_finite(left: Left, rank: int) -> None:
    """Refuse a loss that is not finite: its gradients were used."""
    if not math.isfinite(loss := float(left.loss)):
        raise RunError(
            f"the loss must be finite, but it is {loss} for batch {left.number}; its gradients were used: go "
            "back to the last checkpoint, and lower the learning rate, or look at the batch",
            rank=rank,
            instruction="loss",
        )
