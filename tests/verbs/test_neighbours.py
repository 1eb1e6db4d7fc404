"""What others take of the processors is told from what a measurement takes itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from shardwright.verbs.neighbours import Neighbours
from shardwright.verbs.stalls import analyse

SPIN = "import time\nwhile time.process_time() < .5: pass"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what its processors do")
def test_who_ended_as_our_child_was_no_neighbour() -> None:
    neighbours = Neighbours()
    with subprocess.Popen([sys.executable, "-c", SPIN]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        before = (
            neighbours.seconds
        )  # nobody has asked how it ended, so it counts as somebody else's
        child.wait()
        after = neighbours.seconds
    assert before - after == pytest.approx(0.5, abs=0.2)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what its processors do")
def test_a_busy_neighbour_is_told_with_what_to_do() -> None:
    neighbours = Neighbours()
    count = len(os.sched_getaffinity(0))
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        time.sleep(0.5)
        (told,) = neighbours.notes
        assert "%" in told
        assert "--measure always" in told
    finally:
        for one in busy:
            one.kill()
            one.wait()


@pytest.mark.torch
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what its processors do")
def test_an_analysis_of_stalls_says_what_others_took_meanwhile() -> None:
    """Somebody who is nobody's child any more keeps a core busy."""
    spin = f"exec {sys.executable} -c 'while True: pass'"
    started = subprocess.run(
        ["sh", "-c", f"({spin}) >&- 2>&- & echo $!"], stdout=subprocess.PIPE, text=True, check=True
    )
    try:
        found = analyse([[1.0]] * 40, lambda batch: time.sleep(0.005), batches=12)
    finally:
        os.kill(int(started.stdout), signal.SIGKILL)
    assert "other programs took" in found.notes[-1]
