"""How ``torch.utils.checkpoint`` computes again inside an opaque operator."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint


@contextlib.contextmanager
def checkpoints(again: Callable[[], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
    """Let ``torch.utils.checkpoint`` recompute inside ``again``, where the module has the tensors of
    this call: in backward it has its own, which may be of another step.

    Its reentrant form, which cannot be differentiated by inputs, becomes the other one.
    """
    plain, generator = checkpoint.checkpoint, checkpoint._checkpoint_without_reentrant_generator

    def recomputed(function: Callable[..., Any], *rest: Any, **named: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            with again():
                return function(*args, **kwargs)

        return generator(run, *rest, **named)

    def reentrant(run: Callable[..., Any], preserves: bool, *args: Any) -> Any:
        with _tracked(args):
            return plain(run, *args, use_reentrant=False, preserve_rng_state=preserves)

    with _replaced(recomputed, reentrant):
        yield


@contextlib.contextmanager
def no_checkpoints() -> Iterator[None]:
    """Let ``torch.utils.checkpoint`` keep everything."""

    def plainly(*_: Any, **__: Any) -> Iterator[None]:
        yield

    def run(function: Callable[..., Any], _: bool, *args: Any) -> Any:
        with _tracked(args):
            return function(*args)

    with _replaced(plainly, run):
        yield


def _tracked(args: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
    """Track gradients as the reentrant form does: of what one of its arguments has a gradient for only, which
    parameters inside have no part in."""
    reached = any(isinstance(one, Tensor) and one.requires_grad for one in args)
    return torch.set_grad_enabled(reached and torch.is_grad_enabled())


@contextlib.contextmanager
def _replaced(generator: Callable[..., Any], apply: Callable[..., Any]) -> Iterator[None]:
    """Let both forms of a checkpoint, that without reentrance and the reentrant one, be others for a while."""
    old, before = checkpoint.CheckpointFunction, checkpoint._checkpoint_without_reentrant_generator
    own = old.__dict__.get("apply")  # of another such while around this one
    checkpoint._checkpoint_without_reentrant_generator = generator  # type: ignore[assignment]
    old.apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        checkpoint._checkpoint_without_reentrant_generator = before
        if own is None:
            del old.apply
        else:
            old.apply = own  # type: ignore[method-assign]
