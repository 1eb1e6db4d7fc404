"""What a model's name stands for: how to build it, and how to feed it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from shardwright.errors import InputError
from shardwright.runtime.capture.places import first_line

HELD_OUT_BATCHES = 8
# Samples of a batch where neither the user nor the model's own function says how many.
USUAL_BATCH = 16
MOST_NUMBERS = 2**28  # of an example batch: 2 GiB of tokens, and as much of labels


def _usual_batch() -> int:
    return USUAL_BATCH


def _never_otherwise(batch_size: int, seq: int | None) -> int:
    del batch_size, seq
    return 0


def check_numbers(count: int, what: str) -> None:
    """Refuse an example of too many numbers before it is made. Raises InputError."""
    if count > MOST_NUMBERS:
        raise InputError(
            f"an example batch has at most 2^{MOST_NUMBERS.bit_length() - 1} numbers, but {what}, "
            f"would have {count:,} or more; lower the batch or seq"
        )


# How modules on the meta device would have been built with values.
_makers: WeakKeyDictionary[nn.Module, Callable[[], nn.Module]] = WeakKeyDictionary()


def maker_of(module: nn.Module) -> Callable[[], nn.Module] | None:
    """Return what builds a module with values, where ``ModelSource`` built it without."""
    return _makers.get(module)


def remember_maker(module: nn.Module, make: Callable[[], nn.Module]) -> None:
    """Say what builds a module on the meta device with values."""
    _makers[module] = make


@dataclass(frozen=True)
class ModelSource:
    """A model that can be built and fed.

    ``make_module`` builds it under whatever device is current. ``make_batch`` takes batch size and
    sequence length (None: the model's own choice) and makes an example batch. ``own_batch_size``
    says how many samples it has where nobody asks for a number, ``make_sample`` makes a smaller one
    that a step of so many samples can be captured with, and ``made_otherwise`` says how many rows
    its maker makes where it is not as many as it was asked for. ``place`` is the line of its function.
    """

    name: str
    make_module: Callable[[], nn.Module]
    make_batch: Callable[[int, int | None], dict[str, Tensor]]
    make_batches: Callable[[int, int | None, int], Iterator[dict[str, Tensor]]] | None = None
    make_held_out: Callable[[int, int | None, int], Iterator[dict[str, Tensor]]] | None = None
    own_batch_size: Callable[[], int] = _usual_batch
    make_sample: Callable[[int, int | None], dict[str, Tensor]] | None = None
    made_otherwise: Callable[[int, int | None], int] = _never_otherwise
    place: str = ""

    def build(self, device: str = "meta") -> nn.Module:
        """Build the module; on ``meta`` without storage, or on the CPU where it resists that."""
        if device != "meta":
            with torch.device(device):
                return self.make_module()
        try:
            with torch.device("meta"):
                module = self.make_module()
        except InputError:
            return self.make_module()
        _makers[module] = self.make_module
        return module

    def example(self, batch_size: int, seq: int | None = None) -> dict[str, Tensor]:
        """Make a batch of ``batch_size`` samples (of ``seq`` tokens, where that applies)."""
        if batch_size < 1 or (seq is not None and seq < 1):
            raise InputError(f"batch size and seq must be at least 1, not {batch_size} and {seq}")
        return self.make_batch(batch_size, seq)

    def sample(self, batch_size: int, seq: int | None = None) -> dict[str, Tensor]:
        """Make a batch to capture a step of ``batch_size`` samples with: a few, where these can stand
        for all."""
        if self.make_sample is None or batch_size < 1 or (seq is not None and seq < 1):
            # Batches of one sample are special to export; a few samples stand for all.
            return self.example(max(2, min(batch_size, 4)), seq)
        return self.make_sample(batch_size, seq)

    def batches(
        self, batch_size: int, seq: int | None = None, start: int = 0
    ) -> Iterator[dict[str, Tensor]]:
        """Yield training batches from step ``start`` on; the example for ever where there is no data."""
        if self.make_batches is not None:
            return self.make_batches(batch_size, seq, start)
        return itertools.repeat(self.example(batch_size, seq))

    def first(self, batch_size: int, seq: int | None, count: int) -> list[dict[str, Tensor]]:
        """Return the first training batches, fewer where there are no more. Raises InputError where there is
        none, and for what the user's code raises."""
        what = f"the data of model {self.name!r}"
        found = _drawn(self.batches(batch_size, seq), count, what)
        if not found:
            raise InputError(
                f"{what} must have a batch of {batch_size} samples, but ends before the first; let it give some"
            )
        return found

    def held_out(self, batch_size: int, seq: int | None = None) -> list[dict[str, Tensor]]:
        """Return a few batches that training never sees; none where there is no such data. Raises InputError
        for what the user's code raises."""
        if self.make_held_out is None:
            return []
        batches = self.make_held_out(batch_size, seq, 0)
        return _drawn(batches, HELD_OUT_BATCHES, f"the held-out data of model {self.name!r}")


def _drawn(batches: Iterator[dict[str, Tensor]], count: int, what: str) -> list[dict[str, Tensor]]:
    """Return the first of a user's batches."""
    found: list[dict[str, Tensor]] = []
    try:
        found.extend(itertools.islice(batches, count))
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(
            f"{what} must go on to its end, but raised {first_line(error)}, for batch {len(found)} (from 0); "
            "see that it can be iterated over by itself"
        ) from error
    return found
