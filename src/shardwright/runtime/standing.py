"""Where training stands in its data, as a checkpoint has it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from shardwright.errors import CheckpointError

KEY = "shardwright.loader"  # of the place, among what a checkpoint has besides tensors
SAMPLES, BATCHES, STATE = "samples", "batches", "state"
MOST = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where training stands in its data: so many epochs, and what is ``done`` of the one after them.

    ``of``: what that counts. SAMPLES of a data set of ``size``, in the order of ``seed``; BATCHES of a loader that has no
    state; or BATCHES of one that has, which is then ``state``.
    """

    of: str
    epoch: int = 0
    done: int = 0
    size: int = 0
    seed: int = 0
    state: Any = None

    @property
    def epochs(self) -> int:
        """How many epochs are over."""
        return self.epoch + (self.of == SAMPLES and 0 < self.size <= self.done)


def taken_from(extra: dict[str, Any], directory: Path) -> Place | None:
    """Take the place out of what a checkpoint held. Raises CheckpointError for one where no loader stands."""
    if KEY not in extra:
        return None
    table = extra.pop(KEY)
    names = {field.name for field in fields(Place)}
    is_place = isinstance(table, dict) and {"of"} <= table.keys() <= names
    place = Place(**table) if is_place else None
    wrong = "it has other fields" if place is None else _wrong(place)
    if wrong:
        raise CheckpointError(
            f"a checkpoint says where its loader stood, but {directory} not as this version does ({wrong}); load it "
            "with the version that wrote it, or load an earlier one"
        )
    return place


def _wrong(place: Place) -> str:
    """Return what is wrong with a place, "" if nothing is."""
    if place.of not in (SAMPLES, BATCHES, STATE):
        return f"it counts {place.of!r:.40}"
    for name in ("epoch", "done", "size", "seed"):
        least, most = (-MOST - 1, 2 * MOST + 1) if name == "seed" else (0, MOST)
        value = getattr(place, name)
        if type(value) is not int or not least <= value <= most:
            return f"its {name} is {value!r:.40}"
    is_behind = place.of != SAMPLES or place.done <= place.size
    return "" if is_behind else f"it stands behind {place.done} of {place.size} samples"
