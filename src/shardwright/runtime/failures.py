"""How ranks fail: what one that raised leaves behind, and what is said of the one that failed first.

Of a rank that was killed, or left, there is its exit code, and where its status file last saw it.
"""

from __future__ import annotations

import pickle
import signal
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shardwright.errors import RunError, ShardwrightError, said
from shardwright.runtime.capture.places import raised_at
from shardwright.runtime.status import STATUS_FOLDER, read_status

LOST = 255  # multiprocessing's exit code of a process whose fork server is gone


@dataclass(frozen=True, slots=True)
class Failure:
    """How one rank ended badly. ``error`` is the exception's pickle-safe form."""

    rank: int
    exitcode: int
    kind: str = ""
    message: str = ""
    details: str = ""
    error: ShardwrightError | None = None

    @property
    def is_consequence(self) -> bool:
        """Whether it looks like the echo of another rank's death: a broken connection."""
        echoes = ("Connection closed", "Connection reset", "Broken pipe", "connection was aborted")
        return self.exitcode >= 0 and any(echo in self.message for echo in echoes)

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Failure:
        """Return how a rank failed that raised. Only what nobody foresaw says where in the code that was."""
        if isinstance(error, ShardwrightError):
            return cls(rank, 1, type(error).__name__, str(error), error=_bare(error))
        message = said(error) or "no reason given"
        if place := raised_at(error):  # by code of the user's, which knows itself
            message += f", at {place}"
        elif isinstance(error, OSError) and not isinstance(error, ConnectionError):
            message += "; free space, or check the path"
        else:
            details = "".join(traceback.format_exception(error))
            return cls(rank, 1, type(error).__name__, message, details)
        return cls(rank, 1, type(error).__name__, message)

    def leave(self, directory: Path) -> None:
        """Write it for the launcher; where its folder is on a full disk, among what ranks tell in memory."""
        for folder in (directory, directory / STATUS_FOLDER):
            with suppress(OSError):
                write_whole(folder / f"{self.rank}.failure", self)
                return


def _bare(error: ShardwrightError) -> ShardwrightError:
    """Drop what an exception drags along; only message and fields travel."""
    error.__traceback__ = error.__cause__ = error.__context__ = None
    return error


def failure(exitcode: int, rank: int, directory: Path) -> Failure:
    """Return how a rank failed, as it told itself where it could."""
    for folder in (directory, directory / STATUS_FOLDER):
        report = folder / f"{rank}.failure"
        if exitcode > 0 and report.exists():
            return pickle.loads(report.read_bytes())
    return Failure(rank, exitcode)


def write_whole(path: Path, value: object) -> None:
    """Pickle a value into a file that is there whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_bytes(pickle.dumps(value))
    partial.replace(path)


def explain(failures: list[Failure], directory: Path) -> Exception:
    """Return the error of the rank that failed first: killed before raised before cut off."""
    first = min(failures, key=lambda f: (f.exitcode >= 0, f.is_consequence, f.rank))
    status = read_status(directory, first.rank)
    if isinstance(first.error, ShardwrightError):
        return first.error
    stage = status.stage if status else -1
    instruction = status.instruction if status else ""
    where = f"rank {first.rank}"
    if status is not None:
        where += f" (stage {stage}, step {status.step}, {instruction or 'between steps'})"
    text = f"all ranks must stay alive, but {where} {_cause(first)}; all ranks were ended. " + (
        "Start again, from the last checkpoint where there is one"
        + (f".\n{first.details}" if first.details else "")
    )
    return RunError(text, rank=first.rank, stage=stage, instruction=instruction)


def _cause(failure: Failure) -> str:
    if failure.exitcode == -signal.SIGKILL:
        return "was killed by SIGKILL (as the system does when memory runs out)"
    if failure.exitcode < 0:
        return f"was killed by {signal.Signals(-failure.exitcode).name}"
    if failure.exitcode == LOST and not failure.kind:
        return "ended with the process that ranks are started from, which somebody or the system killed"
    if not failure.kind:
        return f"ended with exit code {failure.exitcode} before it was done"
    return f"raised {failure.kind}: {failure.message}"
