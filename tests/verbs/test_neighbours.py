"""What others take of the processors is told from what a measurement takes itself."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from shardwright.verbs.neighbours import Neighbours

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
