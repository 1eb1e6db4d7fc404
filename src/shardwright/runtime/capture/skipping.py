"""What a forward skips at random, such as every tenth layer (LayerDrop), as a choice between two values.

``if torch.rand([]) < p: continue`` asks for a truth that a trace does not know. So forward runs without values, once
with each such question answered yes and once no, and every call of torch is written down by where its tensors come from.
Where the answer only decides which calls are made right behind the question, none or some others, and all that follows
is the same but for tensors that these make, the graph does without the question: it makes the calls of both answers, and
takes ``where(drawn, the one, the other)``. What is left out has gradients of zeros then, where PyTorch has none.
Two more runs, that skip every other time, say which of what earlier questions left is taken.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from shardwright.runtime.capture.drawing import drawn_numbers, is_unit
from shardwright.runtime.capture.layers import Unclear
from shardwright.runtime.capture.lying import memory_of
from shardwright.runtime.capture.places import running_line

_DRAWS = frozenset({"rand", "uniform_", "bernoulli_", "bernoulli", "rand_like", "randn", "normal_"})
_COUNTING = frozenset({"batch_norm", "instance_norm"})  # write the statistics that they are given
_PASSES = frozenset({"reshape", "__getitem__"})
_COMPARES = {"lt": True, "le": True, "gt": False, "ge": False}  # whether with what is larger
_LOOKS = (bool, int, float, str, tuple, torch.dtype, torch.device, torch.layout)
_PLAIN = (int, float, str, bool, complex, bytes, type(None), torch.dtype, torch.device)


# A call's place: its number where nothing is left out, or of which question and which of the calls made instead.
Place = int | tuple[int, int]
# A tensor's name: a parameter's or an input's own, or as which result of which call it was made.
Name = str | tuple[Place, int]


@dataclass(frozen=True)
class _Named:
    name: Name

    def at(self, places: Sequence[Place]) -> _Named:
        """Return what it is called where the calls of a run have those places."""
        name: Any = self.name
        return self if isinstance(name, str) else _Named((places[name[0]], name[1]))


@dataclass(frozen=True)
class Skip:
    """Calls that may be left out, behind a question on a line, for others at ``places``. ``instead`` says of each of their
    results that is read later what is read where they are left out; ``written`` are the buffers that they write."""

    calls: range
    line: str
    places: tuple[Place, ...] = ()
    written: tuple[str, ...] = ()
    instead: dict[Name, Name] = field(default_factory=dict[Name, Name])
    others: list[Any] = field(default_factory=list[Any])

    def makes(self, name: Name) -> bool:
        """Whether a tensor is made by these calls."""
        return not isinstance(name, str) and name[0] in self.calls


@dataclass(frozen=True)
class Skips:
    """All that a forward may leave out, in order; ``answer`` is the one with which it does not, and makes ``calls``."""

    each: tuple[Skip, ...]
    answer: bool
    calls: tuple[str, ...]

    @property
    def note(self) -> str:
        """What a user should know."""
        lines = ", ".join(dict.fromkeys(one.line for one in self.each))
        return lines and (
            f"what chance decides at {lines} is computed either way, and one of both is taken: "
            "gradients of the other are zeros, where PyTorch has none"
        )


class _Calls(TorchFunctionMode):
    """Sees every call of torch, and knows tensors by their names, and those that chance alone decides."""

    def __init__(self, named: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.count = 0
        self.names: dict[int, Name] = {id(tensor): name for name, tensor in named.items()}
        self.tensors: dict[Name, Tensor] = {**named}  # alive, so that no other has the id of one
        self.drawn: set[int] = set()
        self.uniform: set[int] = set()
        self.sure: dict[int, bool] = {}
        self.is_asked = False

    answered: Callable[[Tensor], bool]  # answers a question that chance decides
    made: Callable[[Any, Any, dict[str, Any]], Any]  # makes a call

    def forget(self) -> None:
        """Forget a call that only asked how a tensor looks."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See a call."""
        del types
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name == "_set_grad_enabled":  # which a trace does not pass on
            return func(*args, **kwargs)
        is_drawn = self._is_drawn(name, _tensors((args, kwargs)))
        if is_drawn and name == "__bool__":
            return self._truth(args[0])
        if is_drawn and name == "item":
            func, name, args = torch.reshape, "reshape", (*args, ())
        result = self.made(func, args, kwargs)
        if result is not None and not _tensors(
            result
        ):  # a shape, which may be asked for by one run only
            self.forget()
            return result
        self._name(_tensors(result), is_anew=_writes(name, kwargs))
        if is_drawn and isinstance(result, Tensor):
            self.drawn.add(id(result))
            self._weigh(name, args, kwargs, result)
        self.counted(name)
        return result

    def counted(self, name: str) -> None:
        """Count a call."""
        del name
        self.count += 1

    def _name(self, made: Sequence[Tensor], *, is_anew: bool) -> None:
        for place, one in enumerate(made):
            if is_anew or id(one) not in self.names:
                self.names[id(one)] = self.count, place
                self.tensors[self.count, place] = one

    def _is_drawn(self, name: str, given: Sequence[Tensor]) -> bool:
        return name in _DRAWS or (bool(given) and self.drawn.issuperset(map(id, given)))

    def _truth(self, drawn: Tensor) -> bool:
        self.is_asked = True
        known = self.sure.get(id(drawn))
        return self.answered(drawn) if known is None else known

    def _weigh(self, name: str, args: Any, kwargs: Any, result: Tensor) -> None:
        """Remember what chance does not decide: a number between 0 and 1 is never less than 0."""
        bounds = [one for one in args if isinstance(one, (int, float))]
        is_known = id(next(iter(args), None)) in self.uniform
        if (is_known and name in _PASSES) or is_unit(name, bounds, kwargs):
            self.uniform.add(id(result))
        elif is_known and name in _COMPARES and not all(0 < one < 1 for one in bounds):
            self.sure[id(result)] = (bounds[0] >= 1) == _COMPARES[name]


def _tensors(value: Any) -> list[Tensor]:
    return [one for one in pytree.tree_leaves(value) if isinstance(one, Tensor)]


def _writes(name: str, kwargs: Any) -> bool:
    is_in_place = name.endswith("_") and not name.endswith("__")
    return is_in_place or name == "__setitem__" or name[:3] == "__i" or "out" in kwargs


# -- which calls are left out -----------------------------------------------------------------------------


class _Written(_Calls):
    """Writes calls down while every question is answered in turn."""

    def __init__(self, named: Mapping[str, Tensor], answer: Callable[[int], bool]) -> None:
        super().__init__(named)
        self.answer = answer
        self.said: list[list[Any]] = []
        self.given: list[Any] = []  # the same with their arguments' form
        self.questions: list[tuple[int, str]] = []
        self.writes: list[tuple[int, int]] = []  # by which call which memory is written
        self.owners = {memory_of(tensor): name for name, tensor in named.items()}
        self.memories = dict.fromkeys(self.owners, -1)  # first seen at which call

    def answered(self, drawn: Tensor) -> bool:
        """Answer as this run does."""
        self.questions.append((self.count, running_line()))
        return self.answer(len(self.questions) - 1)

    def made(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Write down the call, and make it."""
        self.note(func, args, kwargs)
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        written = (args[:1], kwargs.get("out")) if _writes(name, kwargs) else ()
        if name in _COUNTING:
            written = args[1:3]
        self.writes += [(self.count, memory_of(one)) for one in _tensors(written)]
        for one in _tensors((args, kwargs, result)):
            self.memories.setdefault(memory_of(one), self.count)
        return result

    def forget(self) -> None:
        """Write nothing of the last call."""
        self.said.pop()
        self.given.pop()

    def note(self, func: Any, *arguments: Any) -> None:
        """Write a call so that it is equal to another only where both mean the same."""
        self.said.append([func, *map(self._said, pytree.tree_leaves(arguments))])
        given = pytree.tree_map_only(Tensor, self._said, arguments)
        self.given.append((func, torch.is_grad_enabled(), given))

    def _said(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if id(value) not in self.names:
                self.names[id(value)] = f"outside {id(value)}"
                self.tensors[f"outside {id(value)}"] = value
            return _Named(self.names[id(value)])
        if isinstance(value, slice):
            return "slice", *map(self._said, (value.start, value.stop, value.step))
        return (type(value), repr(value)) if isinstance(value, _PLAIN) else (type(value), id(value))

    @property
    def pieces(self) -> list[range]:
        """The calls behind each question."""
        starts = [start for start, _ in self.questions]
        stops = [*starts, len(self.said)][1:]
        return [range(*ends) for ends in zip(starts, stops, strict=True)]


def find_skips(
    module: nn.Module, batch: Mapping[str, Tensor], run: Callable[[], Any]
) -> Skips | None:
    """Return what a forward without values leaves out at random; None where nothing, or not so that it can be told.

    ``run`` calls it on the batch, four times at most.
    """
    named = entering(module, batch)

    def written(answer: Callable[[int], bool]) -> _Written:
        calls = _Written(named, answer)
        with calls, drawn_numbers(module):
            result = run()
        calls.note("result", result)
        return calls

    try:
        yes = written(lambda _: True)
        if not yes.is_asked:
            return None
        no = written(lambda _: False)
        answer = len(yes.said) > len(no.said)
        whole, least = (yes, no) if answer else (no, yes)
        skips = _skips(whole, least)
        for others in (0, 1):  # each skips where the one before does not
            some = written(lambda number, others=others: (number % 2 == others) == answer)
            _compare(whole, some, skips, lambda number, others=others: number % 2 != others)
        _compare(whole, least, skips, lambda _: True)
    except Exception:  # noqa: BLE001 - a model that cannot run so is captured as it is
        return None
    each = tuple(one for one in skips if one.instead or one.written)
    return Skips(each, answer, tuple(getattr(one[0], "__name__", "") for one in whole.said[:-1]))


def _skips(whole: _Written, least: _Written) -> list[Skip]:
    """Return how many calls behind each question are left out for how many others."""
    if len(whole.questions) != len(least.questions):
        raise Unclear
    pairs = zip(whole.pieces, least.pieces, whole.questions, strict=True)
    found = list[Skip]()
    for every, few, (_, line) in pairs:
        same = _ending_alike(whole.said[every.start : every.stop], least.said[few.start : few.stop])
        calls, others = range(every.start, every.stop - same), range(few.start, few.stop - same)
        if _touched(least, others):
            raise Unclear
        written = tuple(sorted(_touched(whole, calls)))
        places = tuple((len(found), other) for other in range(len(others)))
        found.append(Skip(calls, line, places, written))
    return found


def _touched(run: _Written, calls: range) -> set[str]:
    """Return the buffers that calls write; raises Unclear where they write something else that others see."""
    memories = {one for call, one in run.writes if call in calls}
    seen = {one for one in memories if run.memories[one] not in calls}
    if not seen <= run.owners.keys():
        raise Unclear
    return {run.owners[one] for one in seen}


def _ending_alike(one: Sequence[list[Any]], other: Sequence[list[Any]]) -> int:
    """Return with how many calls that differ in nothing but what was made before them two pieces end."""
    pairs = zip(reversed(one), reversed(other), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: _alike(*pair), pairs))


def _alike(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(_may_be, one, other))


def _may_be(one: Any, other: Any) -> bool:
    both = isinstance(one, _Named) and isinstance(other, _Named)
    return one == other or (both and not isinstance(one.name, str))


def _compare(
    whole: _Written, some: _Written, skips: Sequence[Skip], is_left: Callable[[int], bool]
) -> None:
    """Learn what some calls read where the whole reads what is left out; raises Unclear where they differ else."""
    absent = [one for number, one in enumerate(skips) if is_left(number)]
    places = _places(skips, len(whole.said), is_left)
    if len(places) != len(some.said):
        raise Unclear
    for call, (place, said) in enumerate(zip(places, some.said, strict=True)):
        if isinstance(place, int):
            own = whole.said[place]
        else:
            own = _other(whole, some, skips[place[0]].others, call, places)
        for one, other in zip(own, said, strict=True):
            _meet(whole, absent, one, other.at(places) if isinstance(other, _Named) else other)


def _places(skips: Sequence[Skip], count: int, is_left: Callable[[int], bool]) -> list[Place]:
    """Return which calls a run makes that leaves out some."""
    places, reached = list[Place](), 0
    for number, skip in enumerate(skips):
        places += range(reached, skip.calls.start)
        reached = skip.calls.start
        if is_left(number):
            places += skip.places
            reached = skip.calls.stop
    return [*places, *range(reached, count)]


def _other(
    whole: _Written, some: _Written, known: list[Any], call: int, places: Sequence[Place]
) -> list[Any]:
    """Return a call that is made instead of those left out; where it is met first, learn it."""
    place: Any = places[call]
    if place[1] == len(known):
        given = pytree.tree_map_only(_Named, lambda one: one.at(places), some.given[call])
        said = [one.at(places) if isinstance(one, _Named) else one for one in some.said[call]]
        known.append((given, said))
        made = [(name, one) for name, one in some.tensors.items() if name[0] == call]
        whole.tensors.update({(place, name[1]): one for name, one in made})  # type: ignore[misc]
    return known[place[1]][1]


def _meet(whole: _Written, absent: Sequence[Skip], one: Any, other: Any) -> None:
    if isinstance(one, _Named) and isinstance(other, _Named):
        _learn(whole, absent, one.name, other.name)
    elif one != other:
        raise Unclear


def _learn(whole: _Written, absent: Sequence[Skip], name: Name, wanted: Name) -> None:
    """Learn that a tensor stands for another, if it must; raises Unclear where it cannot."""
    while skip := next((skip for skip in absent if skip.makes(name)), None):
        if not _look_alike(whole.tensors[name], whole.tensors[wanted]):
            raise Unclear
        name = skip.instead.setdefault(name, wanted)
    if name != wanted:
        raise Unclear


def _look_alike(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype)


# -- a forward that computes all and chooses ----------------------------------------------------------------


class _Chosen(_Calls):
    """Lets a forward leave out nothing, and reads what it would have read, whatever is drawn."""

    def __init__(self, named: Mapping[str, Tensor], skips: Skips) -> None:
        super().__init__(named)
        self.skips = skips
        self.waiting = list(skips.each)
        self.begun: list[tuple[Skip, Tensor, dict[str, Tensor]]] = []
        self.instead: dict[int, Tensor] = {}

    def answered(self, drawn: Tensor) -> bool:
        """Answer so that nothing is left out."""
        if self.waiting and self.waiting[0].calls.start == self.count:
            skip = self.waiting.pop(0)
            before = {name: self.tensors[name].clone() for name in skip.written}
            self.begun.append((skip, drawn.reshape(()).to(torch.bool), before))
        return self.skips.answer

    def made(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Make a call of what is there by now."""
        while self.begun and self.count >= self.begun[0][0].calls.stop:
            self._choose(*self.begun.pop(0))
        args, kwargs = pytree.tree_map_only(Tensor, self._now, (args, kwargs))
        return func(*args, **kwargs)

    def counted(self, name: str) -> None:
        """Count a call; raises Unclear where the run that was watched made another."""
        if self.skips.calls[self.count : self.count + 1] != (name,):
            raise Unclear
        self.count += 1

    def _now(self, tensor: Tensor) -> Tensor:
        return self.instead.get(id(tensor), tensor)

    def _make_others(self, skip: Skip) -> None:
        """Make the calls that would have been made instead."""
        for place, ((func, has_gradient, given), _) in zip(skip.places, skip.others, strict=True):
            args, kwargs = pytree.tree_map_only(_Named, self._called, given)
            with torch.set_grad_enabled(has_gradient):
                result = func(*args, **kwargs)
            self.tensors |= {(place, number): one for number, one in enumerate(_tensors(result))}

    def _called(self, one: _Named) -> Tensor:
        return self._now(self.tensors[one.name])

    def _choose(self, skip: Skip, is_so: Tensor, before: Mapping[str, Tensor]) -> None:
        def one_of(made: Tensor, other: Tensor) -> Tensor:
            first, second = (made, other) if self.skips.answer else (other, made)
            return torch.where(is_so, first, second)

        self._make_others(skip)
        for name, other in skip.instead.items():
            made = self.tensors[name]
            self.instead[id(made)] = one_of(made, self._now(self.tensors[other]))
        for name, old in before.items():
            with torch.no_grad():
                self.tensors[name].copy_(one_of(self.tensors[name], old))


def entering(module: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return all tensors that enter a forward, by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers()), **batch}


@contextlib.contextmanager
def chosen(skips: Skips | None, module: nn.Module, batch: Mapping[str, Tensor]) -> Iterator[None]:
    """Let a forward leave out nothing of what it may."""
    if skips is None:
        yield
        return
    with _Chosen(entering(module, batch), skips) as calls, drawn_numbers(module):
        yield
    if calls.waiting or calls.begun or calls.count < len(skips.calls):
        raise Unclear
