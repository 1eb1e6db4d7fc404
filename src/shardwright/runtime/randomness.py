"""Random numbers that a plan cannot change by accident.

Before every random operator the generator is seeded with a pure function of (seed, minibatch,
microbatch, operator, coordinate on the axes that split the operator). So a recomputed, resumed or
replicated operator draws the same mask, shards draw different ones, and an operator that no axis
splits draws the same under every plan with as many microbatches. The rule:

    place = blake2b-64(repr((operator, coordinate)))
    seed of the generator = splitmix64(place + splitmix64(seed) + minibatch * 2**20 + microbatch + 1)

where minibatch and microbatch count from 0, and microbatch is -1 for what runs once per step. The
minibatch is the one that the operator works for, whichever is the step in which it runs: what is made
again in a later step draws what it drew. An opaque module finds the generators of Python and NumPy
seeded by the same number (NumPy's by its lowest 32 bits).

Generators belong to the whole process, and a loader may draw its batches from them in a thread of its
own. So what draws takes turns (``alone``), and puts the generator back as it was.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

# Where torch's functions that drop elements take their rate.
_RATES = {
    **dict.fromkeys(
        [
            f"{name}{place}"
            for name in (
                "dropout", "dropout1d", "dropout2d", "dropout3d", "feature_dropout",
                "alpha_dropout", "feature_alpha_dropout",
            )
            for place in ("", "_")
        ],
        ("p", 1),
    ),
    "scaled_dot_product_attention": ("dropout_p", 4),
}  # fmt: skip
_MASK = (1 << 64) - 1
# Whose turn it is to use the generators of torch, Python and NumPy.
TURN = threading.RLock()


@dataclass(slots=True)
class Clock:
    """How many steps were taken: the step that is being run. ``first``: the first minibatch since a pipeline
    that is never flushed was empty."""

    step: int = 0
    first: int = 0

    def minibatch(self, shift: int) -> int:
        """Return which minibatch an instruction works for now that lags so many steps behind."""
        return self.step - shift


def place_seed(operator: int, coordinate: tuple[int, ...]) -> int:
    """Return the part of the seed that says which operator draws, and which shard of it."""
    text = repr((operator, coordinate)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def splitmix64(state: int) -> int:
    """Return a well mixed 63-bit number (Steele, Lea, Flood 2014, the splitmix64 finaliser)."""
    state = (state + 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return (state ^ (state >> 31)) >> 1


class RandomSource:
    """The generator of one device, and where in training it stands."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.seed = seed
        self.device = device
        self.moment = 0
        self._generator = torch.default_generator
        if device.type == "cuda":
            torch.cuda.init()
            self._generator = torch.cuda.default_generators[device.index or 0]

    def stand_at(self, minibatch: int, microbatch: int) -> None:
        """Say which minibatch and microbatch the next random operators belong to."""
        self.moment = splitmix64(self.seed) + (minibatch << 20) + microbatch + 1

    def reseed(self, place: int) -> None:
        """Seed the generator for one operator; ``place`` is its ``place_seed``."""
        self._generator.manual_seed(self.number(place))

    def number(self, place: int) -> int:
        """Return the seed of an operator at this moment."""
        return splitmix64(place + self.moment)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Have the generator for a while, and put it back as it was: the user's own random numbers are
        not ours to move."""
        with TURN:
            before = self._generator.get_state()
            try:
                yield
            finally:
                self._generator.set_state(before)


def reseed(source: RandomSource, place: int) -> None:
    """Call ``RandomSource.reseed``: graphs can only name module-level functions."""
    source.reseed(place)


@contextlib.contextmanager
def python_seeded(number: int) -> Iterator[None]:
    """Seed the random numbers of Python and NumPy for a while; the user's own are not ours to move."""
    before = random.getstate(), np.random.get_state()
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


def is_random(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call draws random numbers with these arguments."""
    tags = getattr(target, "tags", ())
    if torch.Tag.nondeterministic_seeded not in tags:
        return False
    names, given = _arguments(target, args, kwargs)
    if given.get("train") is False or given.get("training") is False:
        return False
    rates = [given.get(name, 0.0) for name in ("p", "dropout_p", "dropout") if name in names]
    return not (is_dropout(target) and rates and all(rate == 0.0 for rate in rates))


def _arguments(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[str], dict[str, Any]]:
    """Return the names of an operator's arguments, and what they are in a call, or by default."""
    absent = {argument.name: argument.default_value for argument in target._schema.arguments}
    names = list(absent)
    return names, absent | dict(zip(names, args, strict=False)) | kwargs


def is_dropout(target: Callable[..., Any]) -> bool:
    """Whether an operator draws what to drop, at a rate: not so the distance whose power is ``p``,
    nor draws that are the result."""
    if torch.Tag.nondeterministic_seeded not in getattr(target, "tags", ()):
        return False
    named = {argument.name for argument in target._schema.arguments}  # type: ignore[attr-defined]
    return not named.isdisjoint(("train", "training", "dropout_p"))


class WithoutDropout(TorchFunctionMode):
    """While active, torch's functions that drop elements drop none, whoever calls them."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call a function, its rate set to zero."""
        named = kwargs or {}
        rate, place = _RATES.get(getattr(func, "__name__", ""), ("", 0))
        if rate and len(args) > place:
            args = (*args[:place], 0.0, *args[place + 1 :])
        elif rate:
            named = {**named, rate: 0.0}
        return func(*args, **named)
