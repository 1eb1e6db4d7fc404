"""What is left of a forward behind its first calls of submodules, as an operator of its own.

Much code that no graph can hold is a network with a loss behind it that picks rows by their values.
The network's modules can be captured one by one. So they stay in the graph, and only the rest is opaque:
forward run again, in which the first calls of submodules answer what the graph has computed for them.
What forward does itself before those calls is done twice, once in the graph for their arguments; that
this, and all else that passes by results of modules, is without influence is tried before it is relied on.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.errors import RunError
from shardwright.runtime.capture.counting import Flops, Work, is_pick, tensors_of
from shardwright.runtime.capture.keeping import PLAIN, changes, fingerprint
from shardwright.runtime.capture.lying import memory_of
from shardwright.runtime.capture.observe import Real, is_inside
from shardwright.runtime.capture.prepare import real_twin
from shardwright.runtime.capture.recomputing import no_checkpoints
from shardwright.runtime.capture.record import Slot

Call = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


@dataclass(frozen=True, kw_only=True)
class Tail:
    """The rest of a forward behind calls of submodules at ``paths``, in their order.

    ``results`` are those of the calls, with a slot per tensor behind the arguments' slots. ``state`` are
    the parameters and buffers that the rest may use, ``absent`` those that only the calls do. ``work``
    was counted in it.
    """

    paths: tuple[str, ...]
    results: tuple[Any, ...]
    state: tuple[str, ...]
    absent: tuple[str, ...]
    work: Work

    @property
    def called(self) -> str:
        """How it is called, before the name of its module."""
        names = list(dict.fromkeys(self.paths))
        more = ", ..." if len(names) > 3 else ""
        return f"what follows {', '.join(names[:3])}{more} in"


class _Enough(BaseException):
    """Ends a forward whose first calls of submodules are wanted; no model catches it."""


# -- calls of submodules ------------------------------------------------------------------------------


@contextlib.contextmanager
def _passing(module: nn.Module, call: Call) -> Iterator[None]:
    """Let calls of submodules by the module's own forward, not those inside them, go through ``call``."""
    inside = [0]
    before = {path: vars(child).get("forward") for path, child in module.named_modules() if path}

    def wrapped(path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if inside[0]:
                return forward(*args, **kwargs)
            inside[0] += 1
            try:
                return call(path, forward, args, kwargs)
            finally:
                inside[0] -= 1

        return run

    for path in before:
        child = module.get_submodule(path)
        vars(child)["forward"] = wrapped(path, child.forward)
    try:
        yield
    finally:
        for path, own in before.items():
            held = vars(module.get_submodule(path))
            held.pop("forward")
            if own is not None:
                held["forward"] = own


# Begin and end regions of another mode, which must be left as they were entered.
_BORDERS = {
    torch._C._set_grad_enabled,
    torch.amp.autocast_mode._enter_autocast,
    torch.amp.autocast_mode._exit_autocast,
}


class _Until(TorchFunctionMode):
    """Ends the forward, once, at what it does next itself when it has so many results."""

    def __init__(self, results: Sequence[Any], count: int) -> None:
        super().__init__()
        self.results, self.count, self.is_over = results, count, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if len(self.results) >= self.count and not self.is_over and func not in _BORDERS:
            self.is_over = True
            raise _Enough
        return func(*args, **(kwargs or {}))


def first_results(
    module: nn.Module, forward: Callable[..., Any], tail: Tail, args: Any, kwargs: Any
) -> tuple[Any, ...]:
    """Return the results of the calls before the tail, whatever is done to these later.

    ``forward`` is the module's own, and is run no further. Raises ValueError where it makes other calls.
    """
    return _first_results(module, forward, tail.paths, Passed(args, kwargs))


def _first_results(
    module: nn.Module, forward: Callable[..., Any], paths: Sequence[str], given: Passed
) -> tuple[Any, ...]:
    results: list[tuple[str, Any]] = []

    def keep(path: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        result = forward(*args, **kwargs)
        results.append((path, pytree.tree_map_only(Tensor, torch.clone, result)))
        return result

    with contextlib.suppress(_Enough), _passing(module, keep), _Until(results, len(paths)):
        forward(*given.args, **given.kwargs)
    if [path for path, _ in results] != list(paths):
        raise ValueError("forward calls other modules")
    return tuple(result for _, result in results)


@contextlib.contextmanager
def answered(module: nn.Module, paths: Sequence[str], answers: Sequence[Any]) -> Iterator[None]:
    """Let the first calls of submodules answer what is known already. Raises RunError where forward
    makes others."""
    left = deque(zip(paths, answers, strict=True))

    def answer(path: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if not left:
            return forward(*args, **kwargs)
        expected, known = left.popleft()
        if path != expected:
            raise RunError(
                f"forward of {type(module).__name__} called {path}, but called {expected} here on its "
                "example batch; let it call the same modules first in training and evaluation"
            )
        # What is handed in may be a leaf, which must not be written.
        return pytree.tree_map_only(Tensor, torch.clone, known)

    with _passing(module, answer), no_checkpoints():
        yield


# -- where forward can be cut ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Passed:
    """What a module was called with."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def copied(self) -> Passed:
        """Return the same values in tensors that may be written."""

        def copy(tensor: Tensor) -> Tensor:
            return tensor.detach().clone().requires_grad_(tensor.requires_grad)

        return Passed(*pytree.tree_map_only(Tensor, copy, (self.args, self.kwargs)))


def given_to(model: nn.Module, path: str, batch: Mapping[str, Any]) -> Passed:
    """Return what a module is called with at first in a run of the model, which ends there."""
    found: list[Passed] = []

    def take(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append(Passed(args, kwargs).copied())
        raise _Enough

    handle = model.get_submodule(path).register_forward_pre_hook(take, with_kwargs=True)
    try:
        with contextlib.suppress(_Enough):
            model(**batch)
    finally:
        handle.remove()
    return found[0]


def calls_before_failure(module: nn.Module, run: Callable[[], None]) -> int:
    """Return how many calls of submodules are over when a run of the module, a trace, fails."""
    made = [0]

    def count(path: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        result = forward(*args, **kwargs)
        made[0] += 1
        return result

    with _passing(module, count), contextlib.suppress(Exception):
        run()
    return made[0]


def find_tail(
    real: Real,
    path: str,
    before_failure: Callable[[], int],
    succeeds: Callable[[Tail], bool],
) -> Tail | None:
    """Return the tail of a module that a run of a ``real`` model shows to be one, and that ``succeeds``: behind
    as many calls as a trace makes ``before_failure``, or before forward first asks for values."""
    try:
        model, batch = real()
        module = model.get_submodule(path)
        given = given_to(model, path, batch)
        counts = [before_failure(), calls_before_pick(module, given)]
    except Exception:  # noqa: BLE001 - code of the user's that was run otherwise than it is meant to be
        return None
    for count in dict.fromkeys(counts):
        with contextlib.suppress(Exception):  # such code, again
            tail = tail_of(module, given, count)
            if succeeds(tail):
                return tail
    return None


def calls_before_pick(module: nn.Module, given: Passed) -> int:
    """Return how many calls of submodules are over when forward itself first asks for values."""
    over, inside, first = [0], [False], list[int]()

    def count(path: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        inside[0] = True
        result = forward(*args, **kwargs)
        inside[0], over[0] = False, over[0] + 1
        return result

    def pick() -> None:
        if not inside[0]:
            first.append(over[0])

    own = _twin(module)
    with _passing(own, count), _Asking(pick):
        _run(own, given.copied())
    return first[0] if first else over[0]


def tail_of(module: nn.Module, given: Passed, count: int) -> Tail:
    """Return the tail behind so many calls. Raises ValueError where more passes by it than the results of
    these calls: attributes, hooks, written arguments, random numbers drawn before and used behind."""
    if not count:
        raise ValueError("no module is called before")
    if any(one._forward_hooks or one._forward_pre_hooks for one in module.modules()):
        raise ValueError("hooks may keep what modules make")
    with torch.random.fork_rng():
        start = _twin(module)
        _run(start, given.copied())  # what only a first call does is done
        whole = _twin(start)
        with no_checkpoints():
            kept, result = _run_whole(whole, given, count)
        if _paths_of(_twin(start).eval(), given.copied())[0][:count] != kept:
            raise ValueError("evaluation calls other modules")
        begun, rest = _twin(start), _twin(start)
        torch.manual_seed(0)
        with no_checkpoints():
            answers = _first_results(begun, begun.forward, kept, given.copied())
        for own, other in zip(rest.buffers(), begun.buffers(), strict=True):
            own.copy_(other)
        torch.manual_seed(1)
        used = Flops(lambda: None, lambda _: None)
        with answered(rest, kept, answers), used:
            found = _run(rest, given.copied())
    # Before a backward frees what lives on.
    tail = _tail(rest, kept, _slots(given, answers), used, found)
    _check_alone((whole, result), (rest, found))
    return tail


def _run_whole(module: nn.Module, given: Passed, count: int) -> tuple[tuple[str, ...], Any]:
    """Return the paths of the first calls of submodules, and the result. Raises ValueError where arguments
    are written, or where these submodules keep what they make."""
    before, taken = fingerprint(module), given.copied()
    torch.manual_seed(0)
    paths, result = _paths_of(module, taken)
    kept = paths[:count]
    if len(kept) < count or not _same_tensors(taken, given):
        raise ValueError("arguments are written")
    moved = [path for path, _ in changes(before, fingerprint(module))]
    if any(is_inside(path, one) for path in moved for one in kept):
        raise ValueError("modules keep what they make")
    return kept, result


def _twin(module: nn.Module) -> nn.Module:
    return real_twin(module, shares_parameters=True)


def _run(module: nn.Module, given: Passed) -> Any:
    return module(*given.args, **given.kwargs)


def _paths_of(module: nn.Module, given: Passed) -> tuple[tuple[str, ...], Any]:
    """Return the paths of the submodules that forward calls, and its result."""
    paths: list[str] = []

    def note(path: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        paths.append(path)
        return forward(*args, **kwargs)

    with _passing(module, note):
        result = _run(module, given)
    return tuple(paths), result


def _same_tensors(one: Any, other: Any) -> bool:
    """Whether two results have equal tensors; those that are not numbers equal each other."""
    if isinstance(one, Passed) and isinstance(other, Passed):
        one, other = (one.args, one.kwargs), (other.args, other.kwargs)
    pairs = zip(tensors_of(one), tensors_of(other), strict=True)
    return all(a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)


def _check_alone(whole: tuple[nn.Module, Any], rest: tuple[nn.Module, Any]) -> None:
    """Complain where the rest alone has another result or other buffers than the whole, or, but for the order of
    sums, other gradients. Raises what its backward raises: a hook may differentiate by what a call was given."""
    states = (dict(module.named_buffers()) for module, _ in (whole, rest))
    if not _same_tensors(whole[1], rest[1]) or not _same_tensors(*states):
        raise ValueError("the rest alone does something else")
    trained = [parameter for parameter in whole[0].parameters() if parameter.requires_grad]
    for one, other in zip(_gradients(whole[1], trained), _gradients(rest[1], trained), strict=True):
        if (one - other).nan_to_num().norm() > 1e-3 * one.nan_to_num().norm():
            raise ValueError("gradients pass by the results of calls")


def _gradients(result: Any, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of a sum of what a result holds, zeros where none reaches a parameter."""
    made = [tensor for tensor in tensors_of(result) if tensor.requires_grad]
    if not made or not parameters:
        return []
    ones = [torch.ones_like(tensor) for tensor in made]
    return list(
        torch.autograd.grad(made, parameters, ones, allow_unused=True, materialize_grads=True)
    )


class _Asking(TorchDispatchMode):
    """Says when an operator's result has a shape, or is a number, that depends on values."""

    def __init__(self, say: Callable[[], None]) -> None:
        super().__init__()
        self.say = say

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_index = func is torch.ops.aten.index.Tensor  # by numbers its shape is known
        if is_pick(func, args) or (not is_index and not _BY_VALUE.isdisjoint(func.tags)):
            self.say()
        return func(*args, **(kwargs or {}))


_BY_VALUE = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


def _slots(given: Passed, results: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return results with slots for tensors, numbered behind those of the arguments."""
    leaves = pytree.tree_leaves(results)
    if not all(isinstance(leaf, (Tensor, *PLAIN)) for leaf in leaves):
        raise ValueError("a result that is neither tensor nor number")
    numbers = itertools.count(len(tensors_of((given.args, given.kwargs))))
    return pytree.tree_map_only(Tensor, lambda _: Slot(next(numbers)), results)


def _tail(
    module: nn.Module, kept: tuple[str, ...], results: tuple[Any, ...], used: Flops, found: Any
) -> Tail:
    """Say what the rest needs: all but what lies in the modules that were called before, and is not used."""
    state, absent = list[str](), list[str]()
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        is_used = memory_of(tensor) in used.used
        is_kept = any(is_inside(name, path) for path in kept)
        (state if is_used or not is_kept else absent).append(name)
    return Tail(
        paths=kept,
        results=results,
        state=tuple(state),
        absent=tuple(absent),
        work=used.since((0.0, 0), found),
    )
