"""Run a model once, as Python does, and watch what goes in and out of every module.

What an exported graph would lose or freeze is found here too, with the smallest module around it:
gradients taken inside forward, random numbers of Python and NumPy, and attributes that carry something
from one call to the next.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from shardwright.errors import CaptureError
from shardwright.runtime.capture.counting import Flops, Stream, Work, tensors_of
from shardwright.runtime.capture.gradients import (
    Frame,
    check_engine_call,
    engine_calls,
    smallest_around,
)
from shardwright.runtime.capture.keeping import (
    Attribute,
    attribute_state,
    changes,
    fingerprint,
    python_numbers,
    untouched_numbers,
)
from shardwright.runtime.capture.places import model_line
from shardwright.runtime.capture.prepare import in_precision
from shardwright.runtime.capture.realising import real_copy, real_tensor
from shardwright.runtime.capture.record import Unsupported
from shardwright.runtime.capture.remade import remade
from shardwright.runtime.capture.rowwise import Given, given_call
from shardwright.runtime.capture.switching import check_left, switched
from shardwright.runtime.capture.writes import (
    Arguments,
    Snapshot,
    put_back,
    written_parameters,
)

TAKES = "it takes gradients inside forward"

Real = Callable[[], tuple[nn.Module, Mapping[str, Any]]]


@dataclass
class Site:
    """What was seen of one module: arguments, results and work of each call, and which of the tensors
    of the first call asked for gradients although nothing trained lay behind them. ``call`` is the
    first call with its values, where the module picks elements by their values. ``by_row``: which of its
    tensors were found to have rows that are computed each by itself, None before that was asked.
    ``writes``: it writes what it is given."""

    arguments: list[Any] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)
    asking: frozenset[int] = frozenset()
    call: Given | None = None
    by_row: tuple[int, ...] | None = None
    writes: bool = False

    @property
    def rows(self) -> int:
        """The rows of the first tensor among the arguments of the first call."""
        seen = tensors_of(self.arguments[0])
        return seen[0].shape[0] if seen and seen[0].dim() else 0


@dataclass
class Observation:
    """What was seen of a model.

    ``whole`` are the smallest modules that must stay as they are, and why; ``inner`` those of them that do
    nothing but take gradients. ``differentiates`` are all modules inside which a gradient is taken, ``keeps`` those with state that a call changes.
    ``made``: the dtypes of what each module makes itself. ``is_sure``: what only a first call changes was seen to be without influence, or to have some.
    ``switches``: forward switches ``requires_grad`` of parameters off and on. ``written``: the frozen parameters that
    forward writes. ``real`` makes a model and its batch to be run again, where it was run with values.
    """

    sites: dict[str, Site]
    output: Any
    whole: dict[str, str]
    inner: frozenset[str]
    differentiates: frozenset[str]
    keeps: frozenset[str]
    made: dict[str, set[torch.dtype]]
    is_sure: bool = True
    switches: bool = False
    written: frozenset[str] = frozenset()
    real: Real | None = None

    def made_in(self, path: str) -> frozenset[torch.dtype]:
        """Return the dtypes of what a module makes, and those inside it."""
        return frozenset(
            dtype for one, made in self.made.items() if is_inside(one, path) for dtype in made
        )

    def written_in(self, path: str) -> frozenset[str]:
        """Return the names that frozen parameters which are written have in a module."""
        inside = (one for one in self.written if is_inside(one, path))
        return frozenset(one.removeprefix(f"{path}." if path else "") for one in inside)


def observe(
    module: nn.Module, batch: Mapping[str, Any], dtype: torch.dtype | None = None
) -> Observation:
    """Run a copy of the model for real, floating tensors as ``dtype`` where it is given.

    Raises Unsupported where the model is too large for that, CaptureError where it does not run.
    """

    def real() -> tuple[nn.Module, dict[str, Any]]:
        twin = in_precision(real_copy(module), dtype).train()
        return twin, {name: real_tensor(value, dtype) for name, value in batch.items()}

    seen = watch_runs(*real())
    seen.real = real
    return seen


def watch_runs(twin: nn.Module, batch: Mapping[str, Any]) -> Observation:
    """Run a module that is ours on a batch, again where the first run changed its attributes."""
    before = fingerprint(twin)
    state = Snapshot.of(twin)
    watch, is_sure = _Watch(twin), True
    first = watch.run(batch)
    changed, written = changes(before, fingerprint(twin)), frozenset[str]()
    if not changed:
        written = written_parameters(twin, state, watch.written, batch)
    reasons = list(watch.reasons)
    if changed:
        put_back(twin, state.values)
        state = Snapshot.of(twin)
        again = _Watch(twin, changed)
        warm = fingerprint(twin)
        second = again.run(batch)
        # The first call may have filled them.
        written = written_parameters(twin, state, again.written, batch)
        moving = changes(warm, fingerprint(twin))
        same = _same(first, second)
        if same is None:  # without values, unless both calls did the same things
            same, is_sure = True, watch.stream == again.stream
        if same:  # what only the first call changed is a cache
            changed = [one for one in changed if one in set(moving)]

            def repeats() -> bool:
                put_back(twin, state.values)
                return bool(_same(first, _Watch(twin).run(batch)))

            made_anew = remade(twin, changed, repeats)
            changed = [one for one in changed if one not in made_anew]
        reasons += again.carried(changed)
    whole: dict[str, str] = {}
    for path, reason in reasons:
        whole.setdefault(called(path, watch.sites), reason)
    whole = {
        path: reason
        for path, reason in whole.items()
        if not any(path != other and is_inside(path, other) for other in whole)
    }
    frozen = {path for path, reason in reasons if reason != TAKES} | {path for path, _ in changed}
    return Observation(
        sites=watch.sites,
        output=first,
        whole=whole,
        inner=frozenset(
            path for path in whole if not any(is_inside(one, path) for one in (*frozen, *written))
        ),
        differentiates=frozenset(watch.differentiating),
        keeps=frozenset(path for path, _ in changed),
        made=watch.made,
        is_sure=is_sure,
        switches=watch.switches,
        written=written,
    )


def called(path: str, sites: Mapping[str, Site]) -> str:
    """Return the path itself or the next around it that was called with what can be passed on."""
    while path and path not in sites:
        path = path.rpartition(".")[0]
    return path


def is_inside(path: str, other: str) -> bool:
    """Whether a module's path is another's or lies below it."""
    return not other or path == other or path.startswith(f"{other}.")


def _like(tensor: Tensor) -> Tensor:
    if tensor.layout != torch.strided:  # nested rows, sparse matrices
        raise Unsupported("a tensor that is not dense")
    return torch.empty_like(tensor, device="meta", requires_grad=False)


def _same(one: Any, other: Any) -> bool | None:
    """Whether two results have equal values, None for tensors without values."""
    pairs = list(zip(tensors_of(one), tensors_of(other), strict=False))
    if any(isinstance(tensor, FakeTensor) for pair in pairs for tensor in pair):
        return None
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs)


class _Watch:
    """Watches one run; ``attributes`` are looked at whenever a module begins or ends."""

    def __init__(self, module: nn.Module, attributes: Iterable[Attribute] = ()) -> None:
        self.module = module
        self.sites: dict[str, Site] = {}
        self.reasons: list[tuple[str, str]] = []
        self.differentiating: set[str] = set()
        self.attributes = list(attributes)
        self.stream: list[Any] = []
        self._touched: dict[Attribute, list[tuple[str, ...]]] = {}
        self._written: set[Attribute] = set()
        self._carried: set[Attribute] = set()
        self._frames: list[Frame] = []
        self._counted = Flops(self._pick, self._make)
        self._arguments = Arguments(self._counted)
        self._picking: set[str] = set()
        self.switches = False
        self.made: dict[str, set[torch.dtype]] = {}
        self._begun: list[tuple[float, int]] = []
        self._numbers: Any = None
        self._states: dict[Attribute, Any] = {}

    def run(self, batch: Mapping[str, Any]) -> Any:
        """Run the module with every hook in place; random numbers are put back."""
        handles = list(self._hooks())
        try:
            with (
                torch.random.fork_rng(),
                untouched_numbers(),
                engine_calls(self._differentiate),
                self._looked_up(),
                self._counted,
                switched(self.module) as flags,
            ):
                self._numbers = python_numbers()
                if not any(isinstance(one, FakeTensor) for one in batch.values()):
                    result = self.module(**batch)
                else:
                    with Stream() as stream:
                        result = self.module(**batch)
                    self.stream = stream.noted
                check_left(flags.left)
                self.switches = flags.ever
                self._mark_writing()
                return result
        except CaptureError:
            raise
        except Exception as error:
            raise CaptureError(
                f"a model must run on its example batch, but {type(self.module).__name__} failed "
                f"with {type(error).__name__}: {error}; check the model and the batch's shapes and dtypes",
                place=model_line(error),
            ) from error
        finally:
            for handle in handles:
                handle.remove()

    def _mark_writing(self) -> None:
        """A module whose writes are used outside of it is no part: one around it may be."""
        for path in self._arguments.shown - {""}:
            self.sites.pop(path, None)
        for path in self._arguments.written & self.sites.keys():
            self.sites[path].writes = True

    def carried(self, attributes: Sequence[Attribute]) -> list[tuple[str, str]]:
        """Return the smallest modules around all uses of attributes that carry something on."""
        found: list[tuple[str, str]] = []
        for path, name in attributes:
            if (path, name) in self._written - self._carried:
                continue  # made anew by every call before it is read
            uses = [*self._touched.get((path, name), ()), self._stack_of(path)]
            found.append((_common(uses), f"it keeps {name} from one call to the next"))
        return found

    def _stack_of(self, path: str) -> tuple[str, ...]:
        parts = path.split(".") if path else []
        every = ["", *(".".join(parts[: n + 1]) for n in range(len(parts)))]
        return tuple(one for one in every if one in self.sites)

    # -- hooks -----------------------------------------------------------------------------------

    def _hooks(self) -> Iterator[Any]:
        for path, child in self.module.named_modules():

            def enter(child: nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
                self._look()
                given = tuple(tensors_of((args, kwargs)))
                self._frames.append(Frame(path, child, given))
                self._begun.append(self._counted.now)
                self._arguments.enter(given)

            def leave(_: Any, args: Any, kwargs: Any, result: Any, path: str = path) -> None:
                self._look()
                self._arguments.leave(path, self._frames.pop().tensors)
                work = self._counted.since(self._begun.pop(), result)
                with self._counted.aside():
                    self._record(path, (args, kwargs), result, work)

            yield child.register_forward_pre_hook(enter, with_kwargs=True)
            yield child.register_forward_hook(leave, with_kwargs=True)

    def _record(self, path: str, given: Any, result: Any, work: Work) -> None:
        try:
            arguments, results = (
                pytree.tree_map_only(Tensor, _like, tree) for tree in (given, result)
            )
        except Exception:  # noqa: BLE001 - a packed sequence or nested rows cannot be without values
            return  # so this module cannot be called by itself; one around it may be
        if path not in self.sites:
            tensors = enumerate(tensors_of(given))
            self.sites[path] = Site(asking=frozenset(place for place, t in tensors if _asks(t)))
            if path in self._picking:
                self.sites[path].call = given_call(self.module.get_submodule(path), *given)
        self.sites[path].arguments.append(arguments)
        self.sites[path].results.append(results)
        self.sites[path].work.append(work)

    def _look(self) -> None:
        """Say what has happened since the last look: the innermost running module did it."""
        numbers = python_numbers()
        if numbers != self._numbers:
            self._numbers = numbers
            self._must_stay("it draws random numbers of Python or NumPy")
        for path, name in self.attributes:
            state = attribute_state(self.module.get_submodule(path), name)
            if not bool(self._states.setdefault((path, name), state) == state):
                self._states[path, name] = state
                self._touch((path, name))

    @property
    def written(self) -> Container[int]:
        """The memories that operators have written."""
        return self._counted.written

    def _make(self, dtype: torch.dtype) -> None:
        if self._frames:
            self.made.setdefault(self._frames[-1].path, set()).add(dtype)

    def _pick(self) -> None:
        if self._frames:
            self._picking.add(self._frames[-1].path)

    def _must_stay(self, reason: str) -> None:
        if self._frames:
            self.reasons.append((self._frames[-1].path, reason))

    def _touch(self, key: Attribute) -> None:
        stack = tuple(frame.path for frame in self._frames)
        if stack:
            self._touched.setdefault(key, []).append(stack)

    def _differentiate(self, engine: Callable[..., Any], *args: Any, **options: Any) -> Any:
        check_engine_call(args, options)
        if self._frames:
            path = smallest_around(self._frames, args[4] if len(args) > 4 else ())
            self.reasons.append((path, TAKES))
            self.differentiating.update(frame.path for frame in self._frames)
        return engine(*args, **options)

    # -- reads and writes of attributes ------------------------------------------------------------

    @contextlib.contextmanager
    def _looked_up(self) -> Iterator[None]:
        """Let reads and writes of the watched attributes pass through here."""
        names: dict[str, list[str]] = {}
        for path, name in self.attributes:
            names.setdefault(path, []).append(name)
        originals = {path: type(self.module.get_submodule(path)) for path in names}
        try:
            for path, original in originals.items():
                members: dict[str, Any] = {"__module__": original.__module__}
                members["__qualname__"] = original.__qualname__  # models look classes up by name
                members |= {name: self._property((path, name)) for name in names[path]}
                seen = type(original.__name__, (original,), members)
                self.module.get_submodule(path).__class__ = seen
            yield
        finally:
            for path, original in originals.items():
                self.module.get_submodule(path).__class__ = original

    def _property(self, key: Attribute) -> property:
        name = key[1]

        def read(child: nn.Module) -> Any:
            self._touch(key)
            if key not in self._written:
                self._carried.add(key)
            if name in vars(child):
                return vars(child)[name]
            for parent in type(child).__mro__[1:]:  # the class may hold a default
                if name in vars(parent):
                    return vars(parent)[name]
            raise AttributeError(f"{type(child).__name__!r} has no attribute {name!r}")

        def write(child: nn.Module, value: Any) -> None:
            self._touch(key)
            self._written.add(key)
            vars(child)[name] = value

        def remove(child: nn.Module) -> None:
            self._touch(key)
            del vars(child)[name]

        return property(read, write, remove)


def _asks(tensor: Tensor) -> bool:
    return tensor.requires_grad and tensor.is_leaf and not isinstance(tensor, nn.Parameter)


def _common(stacks: Sequence[tuple[str, ...]]) -> str:
    """Return the innermost module that is in all stacks of running modules."""
    found = ""
    for level in zip(*stacks, strict=False):
        if len(set(level)) > 1:
            break
        found = level[0]
    return found
