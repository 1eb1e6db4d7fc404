"""Bytes of gradients while the backward of one segment runs, as autograd adds them up.

Storages again, not tensors: what an operator passes on as it came (to both terms of a sum, through
a view) is the gradient of its result under another name. A second gradient of one value is added
in place where nobody else holds the first, and into a new tensor otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shardwright.core.graph import Operator, OperatorGraph
from shardwright.core.program import Call, Value
from shardwright.operators.derivatives import base_kind, is_identity, passes_gradient
from shardwright.operators.keeping.temporaries import CELLS, OF_STATE
from shardwright.operators.keeping.workspaces import backward_workspace


def backward_peak(
    graph: OperatorGraph,
    calls: Sequence[Call],
    values: Sequence[Value],
    ends: tuple[tuple[int, ...], tuple[int, ...]],
    released: Sequence[int],
    *,
    sums: Mapping[int, bool] | None = None,
) -> int:
    """Return the most bytes of gradients, less what has been released, at any moment.

    ``ends`` are the segment's (inputs, outputs); ``released`` the saved bytes that go once each call
    has run backward. The gradients of the inputs are counted elsewhere, as if they were there from
    the beginning, and stay. Those of the outputs are counted elsewhere, and outlive this unless it is joined to the
    backward that makes them; then ``sums`` names the inputs whose gradients backwards joined before have begun, and
    whether the sum of two is a new tensor.
    """
    made = {value for call in calls for value in call.results}
    state = _Gradients(graph, values, ends, made.union(ends[0]))
    if sums is not None:
        state.alive = {v: _Gradient(values[v].bytes, 1) for v in state.alive}
        begun = {v: _Gradient(values[v].bytes, 1, is_new) for v, is_new in sums.items()}
        state.alive |= begun
        state.level += sum(gradient.size for gradient in begun.values())
        state.peak = state.level
    for call, size in zip(reversed(calls), reversed(released), strict=True):
        state.run(call, size)
    return state.peak


def is_weight(value: Value) -> bool:
    """Whether gradients come as views of what a product made, transposed, so that the sum of two is a new tensor."""
    return value.role == "parameter"


@dataclass(frozen=True, slots=True)
class SplitPeak:
    """What ``backward_peak`` says of I, which leaves ``kept`` bytes of gradients to W and holds on to the
    gradients of ``outputs``."""

    peak: int
    kept: int
    outputs: tuple[int, ...]


def split_peak(
    graph: OperatorGraph,
    calls: Sequence[Call],
    values: Sequence[Value],
    ends: tuple[tuple[int, ...], tuple[int, ...]],
    work: tuple[Sequence[int], Mapping[int, tuple[int, ...]]],
) -> SplitPeak:
    """Return what a backward comes to that leaves gradients of parameters for later.

    ``work`` are the saved bytes that go with each call, and by its place of a call which leaves some the
    positions of these parameters.
    """
    released, deferred = work
    made = {value for call in calls for value in call.results}
    own = tuple(value for value in ends[0] if values[value].role != "parameter")
    state = _Gradients(graph, values, (own, ends[1]), made.union(ends[0]))
    begun = dict(state.alive)  # keeps them, so that no gradient made later has the id of one
    outside = {id(gradient): value for value, gradient in begun.items()}
    held: dict[int, _Gradient] = {}
    for place in range(len(calls) - 1, -1, -1):
        call, positions = calls[place], deferred.get(place, ())
        held |= state.hold(call.results if positions else ())
        state.run(call, released[place], positions)
    held |= state.hold(value for value in ends[0] if value not in own)
    outputs = tuple(outside[key] for key in held if key in outside)
    return SplitPeak(state.peak, sum(gradient.size for gradient in held.values()), outputs)


@dataclass(frozen=True, slots=True)
class GradientStep:
    """What the backward of a call does to memory: so much ``workspace`` for a moment (negative: what it
    makes lies where something saved lay), gradients ``made`` as (number, bytes), others ``gone``."""

    call: int
    workspace: int
    made: tuple[tuple[int, int], ...]
    gone: tuple[int, ...]


def gradient_steps(
    graph: OperatorGraph,
    calls: Sequence[Call],
    values: Sequence[Value],
    ends: tuple[tuple[int, ...], tuple[int, ...]],
) -> tuple[tuple[GradientStep, ...], dict[int, int]]:
    """Return what ``backward_peak`` adds up, call by call, and which gradient each input ends with."""
    made = {value for call in calls for value in call.results}
    state = _Gradients(graph, values, ends, made.union(ends[0]))
    known = list(state.alive.values())  # a gradient's place in it is its number
    number = {id(gradient): place for place, gradient in enumerate(known)}
    steps: list[GradientStep] = []
    for place in range(len(calls) - 1, -1, -1):
        before = {id(gradient) for gradient in state.alive.values()}
        workspace = state.workspace(calls[place])
        state.run(calls[place], 0)
        after = {id(gradient): gradient for gradient in state.alive.values()}
        new = [gradient for key, gradient in after.items() if key not in number]
        for gradient in new:
            number[id(gradient)] = len(known)
            known.append(gradient)
        steps.append(
            GradientStep(
                call=place,
                workspace=workspace,
                made=tuple((number[id(gradient)], gradient.size) for gradient in new),
                gone=tuple(number[key] for key in before - after.keys()),
            )
        )
    return tuple(steps), {value: number[id(found)] for value, found in state.alive.items()}


@dataclass(slots=True)
class _Gradient:
    """One storage: its bytes here, how many hold it, and whether nothing can be added to it in place."""

    size: int
    holders: int = 0
    is_fixed: bool = False


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A gradient of the value at a call's position, of which so many bytes are ``made`` for it."""

    position: int
    value: int
    gradient: _Gradient
    made: int


def _parts(operator: Operator, arriving: list[_Arrival]) -> list[list[_Arrival]]:
    """Return gradients by when they come: at once, but a cell is two products, of which one's are added up
    before the other's are made."""
    if base_kind(operator.kind) not in CELLS:
        return [arriving]
    names = operator.input_names
    return [
        [one for one in arriving if (names[one.position] in OF_STATE) == is_first]
        for is_first in (True, False)
    ]


@dataclass(slots=True)
class _Gradients:
    """The gradients alive, by value; ``level`` and ``peak`` in bytes."""

    graph: OperatorGraph
    values: Sequence[Value]
    ends: tuple[tuple[int, ...], tuple[int, ...]]
    known: set[int]
    alive: dict[int, _Gradient] = field(default_factory=dict[int, _Gradient])
    level: int = 0
    peak: int = 0

    def __post_init__(self) -> None:
        inputs, outputs = self.ends
        self.level = -sum(self.values[v].bytes for v in inputs if self._is_trained(v))
        self.peak = self.level
        # Held by whoever asked for this backward, too.
        self.alive = {v: _Gradient(0, 2) for v in outputs if self._is_trained(v)}

    def run(self, call: Call, released: int, later: Sequence[int] = ()) -> None:
        """Run one call backward: make its operands' gradients but those at the positions that come
        ``later``, let go of the results', add up."""
        workspace = self.workspace(call)
        coming = [self.alive.pop(value) for value in call.results if value in self.alive]
        arriving = self._arriving(call, coming[0], later) if coming else []
        for part in _parts(self.graph.operators[call.operator], arriving):
            self.level += sum(one.made for one in part)
            self.peak = max(self.peak, self.level + workspace)
            self.level -= released
            for gradient in coming:
                self._let_go(gradient)
            for one in part:
                self._add(one.value, one.gradient)
            released, coming = 0, []

    def hold(self, values: Iterable[int]) -> dict[int, _Gradient]:
        """Keep the gradients of values from being let go of; return them by the ids of their storages."""
        found = [self.alive[value] for value in values if value in self.alive]
        for gradient in found:
            gradient.holders += 1
        return {id(gradient): gradient for gradient in found}

    def workspace(self, call: Call) -> int:
        """Return what the kernel of a call's backward needs besides its results, if it runs."""
        runs = any(value in self.alive for value in call.results)
        return backward_workspace(self.graph, call, self.values) if runs else 0

    def _is_trained(self, value: int) -> bool:
        return self.graph.tensors[self.values[value].tensor].needs_gradient

    def _known(self, value: int) -> int:
        """Return the value that is known of those which a value is another name of."""
        while value not in self.known and self.values[value].alias >= 0:
            value = self.values[value].alias
        return value

    def _arriving(self, call: Call, coming: _Gradient, later: Sequence[int]) -> list[_Arrival]:
        """Return the gradients that a call makes or passes on, and whose they are."""
        operator = self.graph.operators[call.operator]
        result = self.values[next(value for value in call.results if value >= 0)]
        found: list[_Arrival] = []
        for position, operand in enumerate(call.operands):
            value = self._known(operand)
            if position in later or not self._is_trained(value):
                continue
            one = self.values[operand]
            passes = is_identity(self.graph, operator) or (
                one.dtype == result.dtype
                and passes_gradient(operator, position, one.shape, result.shape)
            )
            gradient = coming if passes else _Gradient(one.bytes, is_fixed=is_weight(one))
            gradient.holders += 1
            found.append(_Arrival(position, value, gradient, 0 if passes else gradient.size))
        return found

    def _add(self, value: int, more: _Gradient) -> None:
        first = self.alive.setdefault(value, more)
        if first is more:
            return
        if first.holders > 1 or first.is_fixed:
            total = _Gradient(self.values[value].bytes, 1)
            self.level += total.size
            self.peak = max(self.peak, self.level)
            self.alive[value] = total
            self._let_go(first)
        self._let_go(more)

    def _let_go(self, gradient: _Gradient) -> None:
        gradient.holders -= 1
        if gradient.holders == 0:
            self.level -= gradient.size
