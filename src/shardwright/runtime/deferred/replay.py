"""Replay: the values of a traced storage, by running again the steps that led to them.

Random numbers come from one generator in one order, so all draws before a wanted one are made too,
on memory that is dropped at once. The generator's state before each draw is kept (5 KB), so that a
draw can be repeated later, out of order, bit for bit.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from shardwright.runtime.deferred.trace import Ref, Step, Trace

GENERATOR = torch.default_generator

_aten = torch.ops.aten
# Operators that draw as many numbers whatever values their tensors hold.
_BLIND = frozenset({
    _aten.normal_, _aten.uniform_, _aten.random_, _aten.rand, _aten.randn, _aten.randint,
    _aten.randperm, _aten.rand_like, _aten.randn_like, _aten.randint_like, _aten.exponential_,
    _aten.log_normal_, _aten.cauchy_,
})  # fmt: skip


class Undeferrable(Exception):
    """A factory does what a replay could not repeat."""


class Replay:
    """The default generator's true course, and values on demand."""

    def __init__(self, trace: Trace, state: Tensor) -> None:
        self.trace = trace
        self.state = state  # before the first random step that was not drawn yet
        self._drawn = 0  # how many of ``trace.random`` were
        self._before: dict[int, Tensor] = {}
        self._held: dict[int, torch.UntypedStorage] = {}  # bytes before step ``_time``
        self._time = 0

    # -- values --------------------------------------------------------------------------------

    def tensors(self, refs: list[Ref], keeps: Callable[[int], bool]) -> list[Tensor]:
        """Return tensors as they are now. What ``keeps`` says stays at hand for the next call."""
        now, storages = len(self.trace.steps), {ref.storage for ref in refs}
        wanted = list(zip(storages, itertools.repeat(now), strict=False))
        known = dict.fromkeys(self._held, self._time)
        numbers = self.trace.chain(wanted, known)
        if any(
            self._is_stale(self.trace.steps[number]) for number in numbers if number < self._time
        ):
            self._held = {}
            numbers = self.trace.chain(wanted)
        memory = self._run(numbers, self._held, storages, keeps)
        ran, before = set(numbers), self._held
        used = {s for number in numbers for s in _touched(self.trace.steps[number])}
        self._held = {
            storage: memory[storage]
            for storage in used & memory.keys()
            if keeps(storage) and self._is_new(storage, ran, storage in before)
        }
        self._time = now
        return [ref.on(memory[ref.storage]) for ref in refs]

    def _is_new(self, storage: int, ran: set[int], was_held: bool) -> bool:
        """Whether the steps that ran leave a storage as it is now."""
        last = self.trace.last_change(storage)
        return last in ran or (was_held and last < self._time)

    def _is_stale(self, step: Step) -> bool:
        return not self._held.keys().isdisjoint(step.reads | step.writes)

    def forget(self) -> None:
        """Give back what is at hand."""
        self._held = {}

    def each(self, wanted: Mapping[str, Ref]) -> Iterator[tuple[str, Tensor]]:
        """Yield wanted tensors as they are in the end, each alone in memory, in the order in which
        their random numbers come."""
        end = len(self.trace.steps)
        random = set(self.trace.random)
        chains = {name: self.trace.chain([(ref.storage, end)]) for name, ref in wanted.items()}
        last = {
            name: max((number for number in chain if number in random), default=-1)
            for name, chain in chains.items()
        }
        for name in sorted(wanted, key=last.__getitem__):
            ref = wanted[name]
            memory = self._run(chains[name], {}, {ref.storage}, lambda _: False)
            yield name, ref.on(memory.pop(ref.storage))

    def _run(
        self,
        numbers: list[int],
        held: Mapping[int, torch.UntypedStorage],
        wanted: set[int],
        keeps: Callable[[int], bool],
    ) -> dict[int, torch.UntypedStorage]:
        """Run steps in order and return the memory of what is wanted or kept; the rest is freed
        after its last use."""
        memory = dict(held)
        last = {s: n for n in numbers for s in _touched(self.trace.steps[n])}
        with _values():
            for number in numbers:
                step = self.trace.steps[number]
                self._execute(number, step, memory)
                for storage in _touched(step):
                    if last[storage] == number and storage not in wanted and not keeps(storage):
                        memory.pop(storage, None)
            for storage in wanted:  # never written: what came from outside
                self._storage(storage, memory)
        return memory

    def _execute(self, number: int, step: Step, memory: dict[int, torch.UntypedStorage]) -> None:
        def real(ref: Ref) -> Tensor:
            return ref.on(self._storage(ref.storage, memory))

        args, kwargs = pytree.tree_map_only(Ref, real, (step.args, step.kwargs))
        if step.is_random:
            result = self._draw(number, lambda: step.func(*args, **kwargs))
        else:
            result = call(step, args, kwargs)
        made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        for ref, tensor in zip(step.outputs, made, strict=True):
            if ref.storage not in step.makes:
                continue
            lies = (tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset())
            if (*lies, tensor.dtype) != (ref.size, ref.stride, ref.offset, ref.dtype):
                raise Undeferrable(f"{step.func} lays out its result in a way of its own")
            read = step.reads & memory.keys()
            shares = any(tensor.data_ptr() == memory[one].data_ptr() for one in read)
            memory[ref.storage] = (tensor.clone() if shares else tensor).untyped_storage()

    def _storage(
        self, storage: int, memory: dict[int, torch.UntypedStorage]
    ) -> torch.UntypedStorage:
        if storage not in memory:
            constant = self.trace.constants.get(storage)
            if constant is not None:
                written = self.trace.last_change(storage) >= 0
                memory[storage] = (constant.clone() if written else constant).untyped_storage()
            else:
                memory[storage] = torch.UntypedStorage(self.trace.bytes[storage])
        return memory[storage]

    # -- random numbers ------------------------------------------------------------------------

    def advance(self, stop: int | None = None) -> Tensor:
        """Draw and drop whatever comes before step ``stop`` (None: all) and was not drawn; return the
        generator's state."""
        random = self.trace.random
        while self._drawn < len(random) and (stop is None or random[self._drawn] < stop):
            number = random[self._drawn]
            step = self.trace.steps[number]
            if step.func is None:
                assert step.state is not None
                self.state = step.state
                self._drawn += 1
                continue
            with _values():
                if step.func.overloadpacket in _BLIND:
                    self._execute(number, step, {})
                else:  # how much is drawn depends on values: those before it are needed
                    needs = self.trace.chain([(s, number) for s in step.reads | step.writes])
                    every = step.reads | step.writes
                    memory = self._run(needs, {}, set(every), lambda _: True)
                    self._execute(number, step, memory)
        return self.state

    def _draw(self, number: int, draw: Callable[[], Any]) -> Any:
        before = GENERATOR.get_state()
        random = self.trace.random
        is_next = self._drawn < len(random) and random[self._drawn] == number
        if not is_next and number not in self._before:
            self.advance(number)
            is_next = True
        if is_next:
            self._before[number] = self.state
            self._drawn += 1
        try:
            GENERATOR.set_state(self._before[number])
            result = draw()
            if is_next:
                self.state = GENERATOR.get_state()
            return result
        finally:
            GENERATOR.set_state(before)


def state_now() -> Tensor:
    """Return the default generator's state; under a fake mode torch would write it to no memory."""
    with _disable_current_modes():
        return GENERATOR.get_state()


def call(step: Step, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a step that does not draw of the default generator."""
    if step.state is None:
        return step.func(*args, **kwargs)
    generator = torch.Generator()
    generator.set_state(step.state)
    return step.func(*args, **kwargs | {"generator": generator})


def _touched(step: Step) -> frozenset[int]:
    return step.reads | step.writes | step.makes


@contextlib.contextmanager
def _values() -> Iterator[None]:
    """Run operators for real, whatever modes are on."""
    with _disable_current_modes(), torch.no_grad(), torch.device("cpu"):
        yield
