"""Gradients that forward writes, takes or changes itself: an exported graph holds none of that."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

from shardwright.errors import CaptureError
from shardwright.runtime.capture.places import held_at

_functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]

# Called with what the engine is: roots, their gradients, two flags, inputs, and options by name.
Engine = Callable[..., Any]


@contextlib.contextmanager
def engine_calls(instead: Callable[..., Any]) -> Iterator[None]:
    """Let ``instead`` have every use of autograd's engine, first the engine itself, then its arguments.

    ``torch.autograd.grad``, ``backward``, ``torch.autograd.functional`` and the reverse transforms
    of ``torch.func`` all come through here, by whatever name a model imported them.
    """
    original = torch.autograd._engine_run_backward

    def run(*args: Any, **options: Any) -> Any:
        return instead(original, *args, **options)

    torch.autograd._engine_run_backward = run
    try:
        yield
    finally:
        torch.autograd._engine_run_backward = original


@contextlib.contextmanager
def inference_without_gradients() -> Iterator[None]:
    """Let regions of ``torch.inference_mode`` be such without gradients: an exported graph holds where
    these begin and end, and nothing of those."""
    kind = torch.inference_mode
    before = kind.__enter__, kind.__exit__
    entered: list[bool] = []

    def enter(region: Any) -> None:
        entered.append(torch.is_grad_enabled())
        torch.set_grad_enabled(not region.mode)

    def leave(_: Any, *__: Any) -> None:
        torch.set_grad_enabled(entered.pop())

    kind.__enter__, kind.__exit__ = enter, leave  # type: ignore[method-assign]
    try:
        yield
    finally:
        kind.__enter__, kind.__exit__ = before  # type: ignore[method-assign]


def check_engine_call(args: Sequence[Any], options: dict[str, Any]) -> None:
    """Complain of a ``backward`` that writes gradients into parameters."""
    wanted = args[4] if len(args) > 4 else ()
    if options.get("accumulate_grad") and (
        not wanted or any(isinstance(one, nn.Parameter) for one in wanted)
    ):
        raise CaptureError(
            "forward must not add to the gradients of parameters, but it calls backward() itself; "
            "take what it needs with torch.autograd.grad(outputs, inputs, create_graph=True)"
        )


def check_hooks(module: nn.Module) -> None:
    """Complain of hooks that change or use gradients of parameters: they would never be called."""
    hooked = [
        name
        for name, parameter in module.named_parameters()
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
    ]
    if hooked:
        raise CaptureError(
            f"gradients of parameters must be free of hooks, but {len(hooked)} have some "
            f"({hooked[0]}); remove them, and change gradients in the optimizer's step instead",
            place=held_at(module, hooked[0]),
        )


def check_function(function: Any, args: Sequence[Any]) -> None:
    """Complain of a custom gradient that is given modules: their parameters get gradients from inside its
    backward, if at all, where nobody can collect them."""
    for leaf in pytree.tree_leaves(list(args)):
        owner = getattr(leaf, "func", leaf)  # of a partial
        owner = getattr(owner, "__self__", owner)  # of a method
        if isinstance(owner, nn.Module) and next(owner.parameters(), None) is not None:
            raise CaptureError(
                f"a custom gradient must be one of the tensors it is given, but {function.__name__} is "
                f"given a module ({type(owner).__name__}); call the module outside of it, use "
                "torch.utils.checkpoint, or pass parameters as tensors and return their gradients"
            )


# -- where a gradient is taken ------------------------------------------------------------------------


@dataclass(frozen=True)
class Frame:
    """A module that is running, and the tensors that it was given."""

    path: str
    module: nn.Module
    tensors: tuple[Tensor, ...]


def smallest_around(frames: Sequence[Frame], wanted: Sequence[Any]) -> str:
    """Return the path of the innermost module in which all of a gradient is known.

    ``frames`` are the modules that run, outermost first. A module will not do where another of its
    arguments already depends on what is differentiated by: run by itself it would miss that way.
    """
    inputs = [getattr(one, "node", one) for one in wanted]
    if _functorch.peek_interpreter_stack() is not None:
        return frames[-1].path  # a function of its arguments, differentiated by them
    for frame in reversed(frames):
        own = {id(parameter) for parameter in frame.module.parameters()}
        if all(_is_closed(frame, one, own) for one in inputs):
            return frame.path
    return ""


def _is_closed(frame: Frame, wanted: Any, own: set[int]) -> bool:
    if isinstance(wanted, nn.Parameter) and id(wanted) not in own:
        return False
    node = wanted
    if isinstance(wanted, Tensor):
        if _functorch.is_functorch_wrapped_tensor(wanted):
            return False  # a transform's own tensor: nothing is known of what lies behind it
        if not wanted.requires_grad:
            return True  # the engine will complain
        node = get_gradient_edge(wanted).node
    others = [one for one in frame.tensors if one is not wanted and one.requires_grad]
    return not _reaches([get_gradient_edge(one).node for one in others], node)


def _reaches(starts: Sequence[Any], goal: Any) -> bool:
    queue, known = list(starts), set(starts)
    while queue:
        node = queue.pop()
        if node is goal:
            return True
        more = {after for after, _ in node.next_functions if after is not None} - known
        known |= more
        queue += more
    return False
