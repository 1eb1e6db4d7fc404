"""The complaints: one small tree of exceptions.

Every message has three parts: the rule that was broken, the values that broke it, and the remedy.
``InputError`` and its children end a command with exit code 2, ``NoPlan`` and ``RunError`` with 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwright.core.explanation import Relaxation
    from shardwright.core.plan import Plan


MOST_CHARACTERS = 1500  # of one line of a message


def cleaned(text: str) -> str:
    """Return text as a terminal may have it: whatever a file brings into a message or a table, its
    escape codes, marks that turn the direction of writing, and half characters are shown, not done.
    """
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def shortened(line: str) -> str:
    """Return a line with its middle left out where it is long: rule and remedy stay."""
    if len(line) <= MOST_CHARACTERS:
        return line
    half = (MOST_CHARACTERS - len(" ... ")) // 2
    return f"{line[:half]} ... {line[-half:]}"


def said(error: BaseException) -> str:
    """Return what an error says, "" where one of the user's raises when it is asked."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001  # whatever it raises
        return ""


class ShardwrightError(Exception):
    """Root of everything this package raises on purpose."""

    def __str__(self) -> str:
        return "\n".join(map(shortened, cleaned(super().__str__()).split("\n")))


class ShardwrightWarning(UserWarning):
    """Something is left out, and the rest goes on without it."""


class InputError(ShardwrightError, ValueError):
    """The user's model, batch, cluster, option or file is wrong."""


class CaptureError(InputError):
    """The model cannot be captured as a graph; ``place`` is the line of it that is at fault, where one is."""

    def __init__(self, message: str, *, place: str = "") -> None:
        super().__init__(f"{message} (at {place})" if place else message)
        self.place = place


class PrecisionError(CaptureError):
    """A part of the model has no kernels for the precision it is asked in."""


class PlanMismatch(InputError):
    """This plan is not for this model, cluster or version."""


class StoreError(InputError):
    """The record store cannot be read or written."""


class CheckpointError(InputError):
    """A checkpoint is damaged, incomplete or for another model."""


class NoPlan(ShardwrightError):
    """Nothing in the space satisfies the limits.

    ``problem`` is the rule with its values. ``remedy`` is a guess until somebody tried: then
    ``relaxations`` are the smallest changes that help, each found to by planning under it.
    ``nearest`` is the smallest plan found where memory is what is missing.
    """

    def __init__(
        self,
        problem: str,
        *,
        remedy: str = "",
        relaxations: tuple[Relaxation, ...] = (),
        nearest: Plan | None = None,
    ) -> None:
        super().__init__(f"{problem}; {remedy}" if remedy else problem)
        self.problem = problem
        self.remedy = remedy
        self.relaxations = relaxations
        self.nearest = nearest


class RunError(ShardwrightError):
    """A rank failed while training.

    The fields name where: ``rank``, ``stage`` and the ``instruction`` it was executing (text).
    """

    def __init__(
        self, message: str, *, rank: int = -1, stage: int = -1, instruction: str = ""
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.stage = stage
        self.instruction = instruction
