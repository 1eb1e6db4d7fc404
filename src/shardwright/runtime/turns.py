"""Threads of which only one runs at a time, in an order that does not depend on time.

A thread that must wait passes the turn on to the next one, in the order of their numbers, that can
go on. So nothing can hang: when nobody can go on, all end with what each of them waited for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardwright.errors import RunError

MOST_NAMED = 8  # ranks whose state an error spells out


class Abandoned(RunError):
    """This rank was ended because another one failed."""


@dataclass(frozen=True, slots=True)
class _Wait:
    is_over: Callable[[], bool]
    reason: Callable[[], str]


class Turns:
    """Lets one of several threads run at a time."""

    def __init__(self, count: int) -> None:
        self.failure: BaseException | None = None
        self.where: list[Callable[[], str]] = [lambda: "the start"] * count
        self._turn = [threading.Semaphore(0) for _ in range(count)]
        self._waits: list[_Wait | None] = [None] * count
        self._ended = [False] * count

    def begin(self, rank: int) -> None:
        """Wait for the first turn."""
        self._turn[rank].acquire()
        self._check()

    def wait(self, rank: int, is_over: Callable[[], bool], reason: Callable[[], str]) -> None:
        """Let others run until something is the case. Raises RunError when it never will be."""
        self._check()
        if is_over():
            return
        self._waits[rank] = _Wait(is_over, reason)
        self.pass_on(rank)
        self._turn[rank].acquire()
        self._waits[rank] = None
        self._check()

    def end(self, rank: int) -> None:
        """Leave for good."""
        self._ended[rank] = True
        self._waits[rank] = None
        self.pass_on(rank)

    def fail(self, error: BaseException) -> None:
        """End everything; the first failure is the one that counts."""
        self.failure = self.failure or error

    def pass_on(self, rank: int) -> None:
        """Give the turn to the next rank that can go on; on failure, to any that is left."""
        count = len(self._turn)
        left = [r % count for r in range(rank + 1, rank + count + 1) if not self._ended[r % count]]
        able = [r for r in left if self.failure or self._can_go_on(r)]
        if not able and left:
            self.fail(self._stuck(sorted(left)))
            able = left
        if able:
            self._turn[able[0]].release()

    def _can_go_on(self, rank: int) -> bool:
        wait = self._waits[rank]
        return wait is None or wait.is_over()

    def _check(self) -> None:
        if self.failure is not None:
            raise Abandoned("another rank failed")

    def _stuck(self, left: list[int]) -> RunError:
        texts = [
            f"rank {rank} in {self.where[rank]()} waits for {wait.reason()}"
            for rank in left[:MOST_NAMED]
            if (wait := self._waits[rank]) is not None
        ]
        if len(left) > MOST_NAMED:
            texts.append(f"and {len(left) - MOST_NAMED} more ranks wait")
        ended = [rank for rank, over in enumerate(self._ended) if over]
        if ended:
            texts.append(f"ranks {numbers_text(ended)} have finished")
        return RunError(
            "every message needs all of its ranks, but nobody can go on: "
            + "; ".join(texts)
            + "; this Program is wrong: please report it with the plan",
            rank=left[0],
            instruction=self.where[left[0]](),
        )


def numbers_text(ranks: Sequence[int]) -> str:
    """Write ranks as people read them."""
    shown = ", ".join(str(rank) for rank in ranks[:MOST_NAMED])
    return shown + (f" and {len(ranks) - MOST_NAMED} more" if len(ranks) > MOST_NAMED else "")
