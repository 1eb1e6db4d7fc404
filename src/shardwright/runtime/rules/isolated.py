"""Try splits in a child process, so that a kernel that reads out of bounds ends only a trial.

Some of torch's kernels (fused attention, recurrent layers) do not look at the shapes they are
given. The work runs in a fork of this process and tells every answer through a pipe. Where a trial
ends the fork, another is made: it gives the answers known so far without trying again, so that it
comes to the same trial, which now counts as wrong. So the work must be deterministic, and must
return what can be pickled.
"""

from __future__ import annotations

import faulthandler
import importlib
import math
import multiprocessing
import os
import pickle
import resource
import signal
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch

from shardwright.errors import RunError
from shardwright.runtime.lifeline import die_with_thread
from shardwright.runtime.rules.cases import Case
from shardwright.runtime.rules.pieces import Split, difference

Answer = tuple[float, str]
Differ = Callable[[Case, Split], Answer]
Result = TypeVar("Result")

CRASH = "a piece ended its process"
SECONDS = 30.0  # that a trial, and what comes before and after it, may take
MOST_CRASHES = 200  # of one piece of work


class Crashed(RunError):
    """The work ended its process outside of any trial, or too often."""


@dataclass(slots=True)
class _Journal:
    """What is known of a piece of work: the answers in order, and how it ended."""

    answers: list[Answer] = field(default_factory=list[Answer])
    num_tried: int = 0  # by the last child
    is_trying: bool = False
    ended: tuple[str, Any] | None = None

    def read(self, receiver: Connection) -> None:
        """Follow one child until it has ended."""
        self.num_tried, self.is_trying = 0, False
        while True:
            try:
                word, value = receiver.recv()
            except (EOFError, OSError):
                return
            if word == "begin":
                self.num_tried, self.is_trying = self.num_tried + 1, True
            elif word == "answer":
                self.answers.append(value)
                self.is_trying = False
            else:
                self.ended = word, value


def run_isolated(work: Callable[[Differ], Result], seconds: float = SECONDS) -> Result:
    """Do the work in child processes and return its result; it compares by the function it is given.

    A trial that ends its process, or takes longer than ``seconds``, differs infinitely. Exceptions
    of the work are raised here. Raises Crashed where the work ends its process outside of trials.
    Where processes cannot fork (Windows; CUDA was used before), it is done here, unprotected.
    """
    journal = _Journal()
    for _ in range(MOST_CRASHES):
        exitcode = _attempt(work, seconds, journal)
        if journal.ended is not None:
            word, value = journal.ended
            if word == "unable":
                return work(difference)
            if word == "raised":
                raise value
            return value
        reason = _reason(exitcode, seconds)
        if not journal.is_trying:
            raise Crashed(f"the kernel ended its process ({reason}) outside of any split")
        # After others, a trial may have died of memory that an earlier one damaged: once more.
        if journal.num_tried == 1 or exitcode == -signal.SIGALRM:
            journal.answers.append((math.inf, f"{CRASH} ({reason})"))
    raise Crashed(
        f"more than {MOST_CRASHES} processes ended in trials; this was the last: {reason}"
    )


def is_crash(answer: Answer) -> bool:
    """Whether a trial ended its process."""
    return answer[1].startswith(CRASH)


def _attempt(work: Callable[[Differ], Any], seconds: float, journal: _Journal) -> int | None:
    """Run one child to its end; return its exit code."""
    if "fork" not in multiprocessing.get_all_start_methods():
        journal.ended = "unable", None
        return None
    # Autograd imports it at its first backward: once here, instead of seconds in every child.
    importlib.import_module("torch.fx.experimental.symbolic_shapes")
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(
        target=_child, args=(work, seconds, tuple(journal.answers), sender), daemon=True
    )
    with warnings.catch_warnings():  # other threads hold nothing that the child needs
        warnings.simplefilter("ignore", DeprecationWarning)
        child.start()
    sender.close()
    try:
        with receiver:
            journal.read(receiver)
    finally:
        if journal.ended is None and child.is_alive():
            child.join(0.5)
            child.kill()
        child.join()
    return child.exitcode


def _child(
    work: Callable[[Differ], Any], seconds: float, known: tuple[Answer, ...], sender: Connection
) -> None:
    """Do the work, answering what is known and telling what is new, and leave without cleaning."""
    _settle()
    asked = 0

    def differ(case: Case, split: Split) -> Answer:
        nonlocal asked
        asked += 1
        if asked <= len(known):
            return known[asked - 1]
        sender.send(("begin", None))
        signal.setitimer(signal.ITIMER_REAL, seconds)
        answer = difference(case, split)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        sender.send(("answer", answer))
        return answer

    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        if not _has_autograd():
            sender.send(("unable", None))
        else:
            sender.send(("done", work(differ)))
    except BrokenPipeError:  # nobody listens any more
        pass
    except Exception as error:  # noqa: BLE001 -- raised again by the parent
        sender.send(("raised", _portable(error)))
    finally:
        os._exit(0)


def _settle() -> None:
    """Be quiet, alone, and ended with the parent or by the alarm: its own, so that no orphan runs for ever."""
    die_with_thread()
    torch.set_num_threads(1)  # the pool's other threads were not forked
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    faulthandler.disable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)


def _has_autograd() -> bool:
    """Whether gradients can be taken: not in a fork of a process that took some on CUDA."""
    try:
        torch.ones(1, requires_grad=True).sum().backward()
    except RuntimeError:
        return False
    return True


def _portable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 -- whatever a foreign exception does when unpickled
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _reason(exitcode: int | None, seconds: float) -> str:
    if exitcode is None or exitcode >= 0:
        return f"exit code {exitcode}"
    if exitcode == -signal.SIGALRM:
        return f"not done after {seconds:g} s"
    return signal.Signals(-exitcode).name
