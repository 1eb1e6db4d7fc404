"""The loss of a step: its gradient to begin with, and its sum over microbatches and ranks."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from shardwright.core.completion import sums_ahead
from shardwright.core.program import Kind
from shardwright.errors import RunError
from shardwright.runtime import outputs
from shardwright.runtime.hostcopy import HostCopy
from shardwright.runtime.interpreter import Compiled, Compiler, Machine
from shardwright.runtime.messages import AllReduce
from shardwright.runtime.status import INTERRUPTION
from shardwright.runtime.store import DTYPES
from shardwright.runtime.transfers import Send

# Bits of the leading terms of a number, and how many terms it has: float32 adds up such terms of
# thousands of numbers without rounding, as long as none is thousands of times another.
_TERM_BITS, _TERMS = 12, 3
# What a message of gradients carries besides: these terms of the loss, and whether to stop.
NUM_RIDING = _TERMS + 1


class LossSum:
    """Sums the loss over microbatches and ranks, once a step; tells all whether one was interrupted.

    Where it can, it rides with the last message of gradients instead of sending its own (see
    ``told_early``). ``is_late``: before the update the loss can only be known by waiting for all that
    the device was told to do; where it is summed early, and on the CPU, it is there by then.
    ``is_early``: summing starts before the update, at which ranks need not meet.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        device = next(iter(machine.sites.values())).device
        self.is_late, self.is_early = device.type == "cuda", False
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._sum: HostCopy | _Carried | None = None
        self._last: HostCopy | _Carried | None = None
        self._before: HostCopy | _Carried | None = None
        self._counted = self._slots_counted()
        self._row = torch.empty(NUM_RIDING)  # what rides, written anew in each step, by way of
        self._numbers = self._row.numpy()
        self._seed: tuple[float, Tensor] | None = None  # the scale, and the gradient that is it
        self._is_finished = False
        self._unchecked: int | None = None  # the step whose loss nobody has looked at yet

    @property
    def slots(self) -> list[int]:
        """Where this rank has it, by microbatch."""
        program = self.machine.program
        return outputs.slots_of(program, self.machine.store, program.loss)

    def seed(self, scale: float) -> None:
        """Write the gradient that backward begins with."""
        program, store = self.machine.program, self.machine.store
        loss = program.values[program.loss]
        if loss.gradient < 0 or loss.mesh not in self.machine.sites:
            return
        gradient = program.values[loss.gradient]
        device = self.machine.sites[loss.mesh].device
        if self._seed is None or self._seed[0] != scale:
            dtype = DTYPES[gradient.dtype]
            self._seed = scale, torch.full(gradient.shape, scale, dtype=dtype, device=device)
        for piece in range(program.ring):
            slot = store.slot(loss.gradient, piece)
            # Nothing is added to it in place: the next step begins with it, too.
            store.data[slot], store.owned[slot] = self._seed[1], False

    def start(self) -> None:
        """Start summing, unless that was done in this step."""
        if self._sum is not None:
            return
        machine = self.machine
        device = next(iter(machine.sites.values())).device
        total = torch.zeros(2, dtype=torch.float64, device=device)
        for slot in self._counted:
            held = machine.store.data[slot]
            total[0] += held if held is not None else torch.nan
        total[1] = float(INTERRUPTION.requested)
        self._sum = HostCopy(machine.world.all_reduce(total), device, self._stream)

    def leave(self, dtype: torch.dtype) -> Tensor:
        """Return this rank's part, to be summed in a message of another purpose."""
        held = [self.machine.store.data[slot] for slot in self._counted]
        own = sum(math.nan if one is None else float(one) for one in held)
        if self._row.dtype is not dtype:
            self._row = torch.empty(NUM_RIDING, dtype=dtype)
            self._numbers = self._row.numpy()
        self._numbers[:] = [*terms(own, dtype), INTERRUPTION.requested]
        self._sum = _Carried()
        return self._row

    def arrive(self, sums: Sequence[float]) -> None:
        """Take what all ranks' parts add up to."""
        assert isinstance(self._sum, _Carried)  # made when this rank's part left
        self._sum.numbers = [math.fsum(sums[:-1]), sums[-1]]

    def _slots_counted(self) -> list[int]:
        program = self.machine.program
        site = self.machine.sites.get(program.values[program.loss].mesh)
        is_mine = site is not None and outputs.counts(program, program.loss, site)
        return self.slots if is_mine else []

    def finish(self) -> Tensor:
        """Return the sum, equal on all ranks, on the device: nothing waits there for the host."""
        if self._sum is None:
            raise RuntimeError("the loss was not reduced")
        self._is_finished = True
        if isinstance(self._sum, _Carried):
            return torch.scalar_tensor(self._sum.numbers[0], dtype=torch.float64)
        return self._sum.tensor()[0]

    def number(self) -> float:
        """Return this step's sum or, between steps, the last one's; waits until it is known."""
        known = self._sum or self._last
        return known.read()[0] if known is not None else 0.0

    def check(self, step: int) -> None:
        """Refuse a loss that is not finite before the update or, where it ``is_late``, keep that for
        ``check_last``: to wait for it would leave the device without work."""
        if self.is_late:
            self._unchecked = step
        else:
            self._require_finite(step, "nothing was updated:")

    def check_last(self) -> None:
        """Look at the last step's loss, where the step itself did not."""
        step, self._unchecked = self._unchecked, None
        if step is not None:
            done = "its gradients were used: go back to the last checkpoint, and"
            self._require_finite(step, done)

    def _require_finite(self, step: int, done: str) -> None:
        if not math.isfinite(loss := self.number()):
            raise RunError(
                f"the loss must be finite, but it is {loss} in step {step}; {done} lower the learning "
                "rate, clip gradients, or look at the batch",
                rank=self.machine.world.rank,
                stage=min(self.machine.sites),
                instruction="loss",
            )

    @property
    def interrupted(self) -> bool:
        """Whether some rank was asked to stop before it finished its last step."""
        return self._last is not None and bool(self._last.read()[1])

    @property
    def heard(self) -> bool:
        """The same without waiting: of the last step on the CPU, of the one before on a GPU."""
        known = self._last if self._stream is None else self._before
        return known is not None and bool(known.read()[1])

    def follow(self, other: LossSum) -> None:
        """Take over what another one's last step told."""
        self._before, self._last = self._last, other._last

    def clear(self) -> None:
        """The step is over."""
        if self._sum is not None and self._is_finished:
            self._sum.let_go()
            self._before, self._last = self._last, self._sum
        self._sum, self._is_finished = None, False


class _Carried:
    """Numbers that come with a message of another purpose."""

    def __init__(self) -> None:
        self.numbers: list[float] = []

    def read(self) -> list[float]:
        """Return them."""
        return self.numbers

    def let_go(self) -> None:
        """They take no memory of a device."""


def terms(number: float, dtype: torch.dtype) -> list[float]:
    """Return terms that add up to a number: in float32 its first bits, the next, and the rest."""
    terms: list[float] = []
    while dtype is not torch.float64 and math.isfinite(number) and len(terms) < _TERMS - 1:
        mantissa, exponent = math.frexp(number)
        terms.append(math.ldexp(round(math.ldexp(mantissa, _TERM_BITS)), exponent - _TERM_BITS))
        number -= terms[-1]
    return [*terms, number, *[0.0] * (_TERMS - 1 - len(terms))]


def told_early(compiled: Compiled, compiler: Compiler, total: LossSum) -> Compiled:
    """Return instructions that start summing the loss early, so that it has come by the end of the
    step; else waiting for it takes as long as a message.

    It rides with the last message of gradients where that goes to all ranks, through the host, in a
    type that holds it: what a message of its own would take of a CPU is a hundred times what these
    few numbers take. Else it is sent as soon as it is made. Stages send theirs behind all that another stage waits for, and their last forward, where they may
    (``core.completion.sums_ahead``), and begin the next step without waiting for the slowest; else summing starts with
    the update.
    """
    program, place = compiler.program, _made(compiled, compiler, total.slots)
    is_alike = len(program.meshes) == 1
    on_host = compiler.machine.store.device.type == "cpu"
    if not is_alike and sums_ahead(program, on_host=on_host):
        steps = enumerate(compiled.actions)
        forward = [at for at, (index, _) in steps if program.kind[index] == Kind.FORWARD]
        place = _behind_sends(compiled, max([place, *forward]))
    elif not is_alike:
        return compiled
    if place < 0:
        return compiled
    total.is_late, total.is_early = False, True
    carrier = _carrier(compiled, compiler, place) if is_alike else None
    if carrier is not None:
        carrier.rider = total
        return compiled
    index = compiled.actions[place][0]
    before, after = compiled.actions[: place + 1], compiled.actions[place + 1 :]
    return Compiled((*before, (index, total.start), *after), compiled.exchanges)


def _behind_sends(compiled: Compiled, place: int) -> int:
    """Return the place of the last send that follows an action; its own if none does."""
    places = [
        at
        for at, (index, action) in enumerate(compiled.actions)
        if isinstance(exchange := compiled.exchanges.get(index), Send) and action == exchange.issue
    ]
    return max([place, *places])


def _carrier(compiled: Compiled, compiler: Compiler, made: int) -> AllReduce | None:
    """Return the last message of gradients, if the loss can ride with it: it starts after the action
    that makes the loss, and is there before anything is updated."""
    program, machine = compiler.program, compiler.machine
    if machine.store.device.type != "cpu" or program.updates:
        return None
    own = DTYPES[program.values[program.loss].dtype]
    wide = {torch.float64} if own is torch.float64 else {torch.float64, torch.float32}
    for index, action in reversed(compiled.actions[made + 1 :]):
        exchange = compiled.exchanges.get(index)
        if not isinstance(exchange, AllReduce) or action != exchange.issue:
            continue
        goes_to_all = exchange.size == machine.world.size and exchange.items[0].dtype in wide
        if goes_to_all and program.messages[int(program.item[index])].purpose == "synchronise":
            return exchange
    return None


def _made(compiled: Compiled, compiler: Compiler, slots: Collection[int]) -> int:
    """Return the place of the last action of the last instruction that forward makes the loss by."""
    kinds = compiler.program.kind
    makers = {
        index
        for index, _ in compiled.actions
        if Kind(int(kinds[index])) in (Kind.FORWARD, Kind.MESSAGE)
        and not set(slots).isdisjoint(compiler.touch(index).writes)
    }
    places = [place for place, (index, _) in enumerate(compiled.actions) if index in makers]
    return max(places, default=-1)
