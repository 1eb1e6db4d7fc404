"""What collectives cost a rank that computes at the same time, or that has just computed.

Alone, a collective is quick: all ranks stand ready and all cores are free. In training its threads
need the cores that compute, starting it takes the computing thread's own time, and whoever waits
for it also waits for the slowest rank. All of that is measured here with every rank of the machine
computing: chunks of matrix products with a collective beneath them, and before it.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from shardwright.runtime.profile.clock import Timing, summarise
from shardwright.runtime.profile.segments import Segment

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from shardwright.runtime.collectives import Pending

# A collective hides beneath a chunk of computation of at least so many seconds.
CHUNK_SECONDS = 4e-3
LONG_CHUNK_SECONDS = 1.6e-2
# Several follow each other so closely, as gradients of small layers do: what serves them is awake, and in the caches.
# Of 64 KiB on two Xeon cores each further one takes .11, .19 and .3 ms behind .25, 1 and 4 ms of computation.
GAP_SECONDS = 1e-3
ROUNDS, TURNS, ROW = 16, 4, 4
LONG_ROUNDS = 24
# Slower ones would take too long to hide: only what they hold is measured, in a few rounds, the rest is continued from
# the smaller ones. Those that take longer than this over ``ROUNDS`` are hidden less often, ``TURNS`` times at least.
SLOWEST_SECONDS = 0.05
SLOW_ROUNDS = 2
HIDDEN_SECONDS = 0.16
SIZES = (1024, 64 * 1024, 1024 * 1024, 4 * 1024 * 1024)
_MATRIX = 192
_TOUCHED = 1 << 18

Start = Callable[[], list["Pending"]]
# Sends from the first rank to the second and back again; each runs what it is given before it sends.
ThereAndBack = Callable[[Callable[[], object]], None]


class Exchange(NamedTuple):
    """A message between the ranks of a group: ``start`` sends, ``ask`` says before that what can be received, as
    stages do. Who sends to a rank that has not asked leaves sending to the backend's threads; of one that has, the
    computing thread sends as much as fits."""

    start: Start
    ask: Start = list

    def run(self) -> None:
        """Start it and wait for it."""
        _finish([*self.ask(), *self.start()])


class Row(NamedTuple):
    """Messages that follow each other, and the times of a chunk between two and behind the last."""

    messages: int
    apart: int
    behind: int


class Chunk:
    """Computation of about a given length: a segment, as a step enters it, products, and memory that is not in the cache.

    Behind a message the code and data of segments are cold: on two Xeon cores the first layer takes .06 to .2 ms
    longer, and entering it .03 to .1 ms, behind 1 KiB to 1 MiB of which nothing was waited for.
    """

    def __init__(self) -> None:
        self.segment = Segment()
        self.matrix = torch.rand(_MATRIX, _MATRIX)
        self.memory = torch.zeros(8 * _TOUCHED)
        self.turn = 0
        self.run(40)
        begin = time.thread_time()
        self.run(40)
        self.once = (time.thread_time() - begin) / 40

    def run(self, times: int) -> None:
        """Compute."""
        self.segment.layer()
        self.segment.forward()
        self.segment.forget()
        for _ in range(times):
            torch.mm(self.matrix, self.matrix)
            self.turn = (self.turn + 1) % 8
            self.memory[self.turn * _TOUCHED :][: _TOUCHED // 8].add_(1.0)

    def times(self, seconds: float, group: ProcessGroup) -> int:
        """Return how often to run for so long: the first rank's answer on every rank."""
        shared = torch.tensor([max(1, round(seconds / self.once))])
        dist.broadcast(shared, group=group, group_src=0)
        return int(shared.item())


def time_beneath(
    group: ProcessGroup,
    exchanges: Mapping[tuple[str, int], Exchange],
    turns: Mapping[int, ThereAndBack],
    alone: Mapping[str, Timing],
    chunk: Chunk,
    *,
    cores: float = math.inf,
) -> dict[str, Timing]:
    """Return what collectives cost while ranks compute by ``chunk``; every rank must call it alike.

    ``exchanges`` are by primitive and bytes, ``turns`` those of transfers by bytes; ``cores`` are those that
    ranks share, infinitely many where each has its own. ``held|PRIMITIVE|BYTES`` are seconds that the computing
    thread itself needs to start and finish one; ``stolen|...`` processor seconds of the backend's
    threads, which the computation loses when all cores compute, and by how much longer it computes
    itself meanwhile (interrupts, caches); ``waited|...`` what one takes, besides what it holds, that
    is waited for at once after ``CHUNK_SECONDS`` of computation, for whoever came late by chance, too.
    ``skew``: by what share of what was computed the slowest rank comes later than the mean. ``hiding``:
    how long a small one takes beneath computation, when its threads must wait for a core.
    """
    found: dict[str, Timing] = {}
    hiding: list[float] = []
    skew = _skew(chunk, group, shares_cores=cores < math.inf)
    for (primitive, size), exchange in exchanges.items():
        name = f"{primitive}|{size}"
        if name not in alone:
            continue
        seconds = _agreed(alone[name].seconds, group)
        if seconds >= SLOWEST_SECONDS:
            found[f"held|{name}"] = _held(exchange, chunk, group)
            continue
        times = chunk.times(max(CHUNK_SECONDS, 2 * seconds), group)
        rounds = max(TURNS, min(ROUNDS, int(HIDDEN_SECONDS / seconds)) // TURNS * TURNS)
        apart = chunk.times(max(GAP_SECONDS, 2 * seconds), group)
        rows = _rows(primitive, (apart, times), rounds)
        hidden = _hidden(exchange, chunk, rows, group)
        found[f"held|{name}"], found[f"stolen|{name}"], latency = hidden
        if primitive == "transfer":
            waited = summarise(_one_way(turns[size], chunk, (times, rounds), group))
        else:
            often = times, rounds
            waited = _usual(_waited(exchange, chunk, often, group, (skew.seconds, cores)))
        least = max(waited.seconds - hidden[0].seconds, seconds)
        found[f"waited|{name}"] = Timing(seconds=least, spread=waited.spread, count=rounds)
        if latency and (size <= SIZES[1] or not hiding):
            hiding.append(latency)
    if found:
        hides = summarise(hiding or [CHUNK_SECONDS])
        found |= {"skew": skew, "hiding": hides}
    return found


def _rows(primitive: str, times: tuple[int, int], rounds: int) -> list[Row]:
    """Return the rows in which messages are measured; between two transfers a stage computes."""
    if primitive == "transfer":
        return [Row(messages=1, apart=times[1], behind=times[1])] * rounds
    return [Row(messages=ROW, apart=times[0], behind=times[1])] * (rounds // 2)


def _held(exchange: Exchange, chunk: Chunk, group: ProcessGroup) -> Timing:
    """Return what the computing thread holds of a message that most of its time is waited for."""
    times, held = chunk.times(CHUNK_SECONDS, group), list[float]()
    for _ in range(SLOW_ROUNDS):
        begin = time.thread_time()
        pending = exchange.ask()
        asked = time.thread_time()
        chunk.run(times)
        alone = time.thread_time()
        pending += exchange.start()
        started = time.thread_time()
        chunk.run(times)
        done = time.thread_time()
        _finish(pending)
        held.append(asked - begin + started - alone + time.thread_time() - done)
    return summarise(held)


def _agreed(seconds: float, group: ProcessGroup, rank: int = 0) -> float:
    """Return one rank's number, the first's, on every rank."""
    shared = torch.tensor([seconds], dtype=torch.float64)
    dist.broadcast(shared, group=group, group_src=rank)
    return float(shared.item())


def _hidden(
    exchange: Exchange, chunk: Chunk, rows: Sequence[Row], group: ProcessGroup
) -> tuple[Timing, Timing, float]:
    """Return what the computing thread holds of each message, what is stolen of it while it computes, and seconds
    until the last of a row is complete (0 where nobody is told of that)."""
    held: list[float] = []
    others: list[float] = []
    slower: list[float] = []
    ended: list[float] = []
    exchange.run()
    for count, apart, behind in rows:
        dist.barrier(group)
        chunk.run(apart)  # what has waited computes slower at first
        begin = time.thread_time()
        chunk.run(behind)
        alone, computed = time.thread_time() - begin, 0.0
        process, begin = time.process_time(), time.thread_time()
        pending = exchange.ask()
        for number in range(1, 1 + count):
            start = time.perf_counter()
            pending += exchange.start()
            if number < count:
                pending += exchange.ask()
            else:
                note_end(pending, start, ended)
            started = time.thread_time()
            chunk.run(apart if number < count else behind)
            computed += time.thread_time() - started
        done = time.thread_time() - begin
        others.append(max(time.process_time() - process - done, 0.0) / count)
        _finish(pending)
        held.append((time.thread_time() - begin - computed) / count)
        slower.append((computed - alone * (1 + (count - 1) * apart / behind)) / count)
    taken, more = summarise(others), summarise(slower)
    stolen = Timing(
        seconds=taken.seconds + max(more.seconds, 0.0),
        spread=taken.spread + more.spread,
        count=taken.count,
    )
    return summarise(held), stolen, statistics.median(ended or [0.0])


def note_end(pending: list[Pending], begin: float, ended: list[float]) -> None:
    """Let the backend's thread note when the last work is complete, where it can tell."""
    last = [work for one in pending for work in one.works][-1:]  # none where a rank takes no part
    for work in last:
        try:
            work.get_future().add_done_callback(lambda _: ended.append(time.perf_counter() - begin))
        except (RuntimeError, NotImplementedError):
            return


def _finish(pending: list[Pending]) -> None:
    for one in pending:
        one.wait()


def _waited(
    exchange: Exchange,
    chunk: Chunk,
    often: tuple[int, int],
    group: ProcessGroup,
    late: tuple[float, float],
) -> list[float]:
    """Return by how much rounds of computing and waiting exceed what ``computed`` tells of them. ``late``: why ranks
    do not come at once, their skew and the cores that they share."""
    times, rounds = often
    mine: list[tuple[float, float, float]] = []
    dist.barrier(group)
    for _ in range(rounds):
        begin, before = time.perf_counter(), time.thread_time()
        chunk.run(times)
        ran, after = time.perf_counter(), time.thread_time()
        exchange.run()
        mine.append((time.perf_counter() - begin, ran - begin, after - before))
    took, own, busy = seen_by_all(mine, group).unbind(-1)
    return (took.mean(dim=0) - computed(own, busy, *late)).tolist()


def computed(own: torch.Tensor, busy: torch.Tensor, skew: float, cores: float) -> torch.Tensor:
    """Return what computing is of every round, from how long it was for each rank (rows) by the clock on the wall and
    by its thread's: a rank's share and what it waits for the slowest because of a ``skew``; where there is none, what
    the slowest took. Who has no core when a round begins waits for one as if for the message, though: ranks together
    compute no faster than their ``cores`` do."""
    slowest = own.mean(dim=0) * (1 + skew) if skew else own.max(dim=0).values
    return torch.maximum(slowest, busy.sum(dim=0) / cores)


def _one_way(
    there_and_back: ThereAndBack, chunk: Chunk, often: tuple[int, int], group: ProcessGroup
) -> list[float]:
    """Return what a transfer takes where ranks compute in turns, each before it sends: so do stages of a
    pipeline that wait for each other. What has waited computes slower at first; that belongs to the transfer: only
    what the same computation takes a rank that does not wait is taken off."""
    times, rounds = often
    each, found = rounds // TURNS, list[float]()
    for _ in range(TURNS):
        own = sum(_without_waiting(rank, chunk, (times, each), group) for rank in range(2))
        begin = time.perf_counter()
        for _ in range(each):
            there_and_back(lambda: chunk.run(times))
        found.append(((time.perf_counter() - begin) / each - own) / 2)
    return found


def _without_waiting(rank: int, chunk: Chunk, often: tuple[int, int], group: ProcessGroup) -> float:
    """Return what a chunk takes a rank of the group, one after another, while the others wait; equal on all."""
    times, rounds = often
    took = 0.0
    dist.barrier(group)
    if group.rank() == rank:
        chunk.run(times)
        begin = time.perf_counter()
        for _ in range(rounds):
            chunk.run(times)
        took = (time.perf_counter() - begin) / rounds
    return _agreed(took, group, rank)


def _skew(chunk: Chunk, group: ProcessGroup, *, shares_cores: bool) -> Timing:
    """Return by what share of the computation since they last met ranks wait for the slowest; none where they share
    cores, since then that is why."""
    if shares_cores:
        return Timing(seconds=0.0, spread=0.0, count=1)
    times = chunk.times(LONG_CHUNK_SECONDS, group)
    mine: list[float] = []
    for _ in range(LONG_ROUNDS):
        dist.barrier(group)
        begin = time.perf_counter()
        chunk.run(times)
        mine.append(time.perf_counter() - begin)
    ranks = seen_by_all(mine, group)
    late = (ranks.max(dim=0).values - ranks.mean(dim=0)) / ranks.mean(dim=0)
    return _usual(late.tolist())


def seen_by_all(mine: Sequence[object], group: ProcessGroup) -> torch.Tensor:
    """Return what every rank has seen, ranks first."""
    seen = torch.tensor(mine, dtype=torch.float64)
    rows = [torch.empty_like(seen) for _ in range(group.size())]
    dist.all_gather(rows, seen, group=group)
    return torch.stack(rows)


def _usual(rounds: Sequence[float]) -> Timing:
    """Return the mean of all rounds but the longest eighth: what is rare is in few steps, what is not adds up in each."""
    kept = sorted(rounds)[: max(1, len(rounds) * 7 // 8)]
    return replace(summarise(list(rounds)), seconds=max(statistics.mean(kept), 0.0))
