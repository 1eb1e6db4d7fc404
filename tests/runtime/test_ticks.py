"""When instructions ran: by a clock that is read at once, and by one that can be read afterwards."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from shardwright.runtime.clocks import DeviceTicks, HostTicks, ticks_of
from shardwright.runtime.collectives import Pending
from shardwright.runtime.interpreter import Compiled
from shardwright.runtime.messages import Exchange
from shardwright.runtime.status import StatusFile
from shardwright.runtime.trace import Stopwatch

pytestmark = pytest.mark.torch


@dataclass
class Queue:
    """A device that comes to its work later: seconds lie in a queue until somebody waits for all."""

    asked: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def work(self, seconds: float) -> None:
        self.asked.append(seconds)

    def mark(self) -> int:
        return len(self.asked)

    def settle(self) -> None:
        self.times = [0.0, *np.cumsum(self.asked).tolist()]

    def seconds(self, mark: int) -> float:
        return self.times[mark]


class Late(Exchange):
    """A message whose backend is told to work at once and is waited for later."""

    def __init__(self, queue: Queue) -> None:
        super().__init__(())
        self.queue = queue
        self.wire: list[Pending] = []

    def issue(self) -> None:
        self.queue.work(1.0)

    def under_way(self) -> list[Pending]:
        return self.wire

    def complete(self) -> None:
        self.queue.work(4.0)


def test_times_are_those_of_the_work_not_of_asking_for_it() -> None:
    queue = Queue()
    message = Late(queue)
    actions = (
        (0, lambda: queue.work(10.0)),
        (1, message.issue),
        (2, lambda: queue.work(20.0)),
        (1, message.complete),
        (2, lambda: queue.work(0.5)),
    )
    with ThreadPoolExecutor(1) as waiters:
        clock = Stopwatch(4, StatusFile(0), queue, waiters)
        clock.walk(Compiled(actions, {1: message}))
        queue.settle()
    seen = clock.seen()
    np.testing.assert_array_equal(seen.start, [0.0, 10.0, 11.0, np.nan])
    np.testing.assert_array_equal(seen.end, [10.0, 11.0, 35.5, np.nan])
    np.testing.assert_array_equal(seen.asked, [np.nan, 31.0, np.nan, np.nan])


class Heard:
    """A work that notes which thread waits for it, and tells nobody else that it is complete."""

    def __init__(self) -> None:
        self.by: set[int] = set()

    def get_future(self) -> None:
        raise NotImplementedError

    def wait(self) -> None:
        self.by.add(threading.get_ident())


class Sent(Exchange):
    """A message of one work."""

    def __init__(self, work: Heard) -> None:
        super().__init__(())
        self.work = work

    def issue(self) -> None:
        self.pending = Pending((self.work,), torch.empty(0))  # type: ignore[arg-type]

    def complete(self) -> None:
        self._wait()


@pytest.mark.parametrize("is_at_once", [True, False])
def test_only_what_is_asked_for_later_is_waited_for_by_another_thread(is_at_once: bool) -> None:
    message, ticks = Sent(Heard()), HostTicks()
    between = () if is_at_once else ((1, lambda: None),)
    actions = ((0, message.issue), *between, (0, message.complete), (1, lambda: None))
    with ThreadPoolExecutor(1) as waiters:
        clock = Stopwatch(2, StatusFile(0), ticks, waiters)
        clock.walk(Compiled(actions, {0: message}))
    assert (message.work.by == {threading.get_ident()}) == is_at_once
    seen = clock.seen()
    assert seen.start[0] <= seen.asked[0]
    assert seen.start[0] <= seen.end[0] <= seen.end[1]


def test_the_cpu_is_read_by_the_hosts_clock() -> None:
    ticks = ticks_of(torch.device("cpu"))
    assert isinstance(ticks, HostTicks)
    before, mark, after = time.perf_counter(), ticks.mark(), time.perf_counter()
    ticks.settle()
    assert before <= ticks.seconds(mark) <= after


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch can use no GPU here")
def test_a_gpu_is_read_by_its_own_events() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    ticks = ticks_of(device)
    assert isinstance(ticks, DeviceTicks)
    begin = time.perf_counter()
    first = ticks.mark()
    torch.cuda._sleep(200_000_000)  # cycles: at most a tenth of a second, asked for in no time
    asked = time.perf_counter()
    second = ticks.mark()
    ticks.settle()
    end = time.perf_counter()
    assert begin - 1e-3 <= ticks.seconds(first) <= ticks.seconds(second) <= end + 1e-3
    assert ticks.seconds(second) > asked
