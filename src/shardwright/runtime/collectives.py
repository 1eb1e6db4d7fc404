"""The collectives as the executor runs them and the profiler measures them, one flat buffer each.

Every function starts its work and returns a ``Pending``; nothing blocks. Where gloo's own algorithm
is poor another one of equal result is used: its reduce-scatter is an all-reduce and a copy, so we
exchange the pieces (all-to-all) and add them in rank order; its all-gather copies every piece
twice, so each rank sends its own straight into the others' outputs; its all-to-all, and broadcasts by
all ranks, send one way after the other where ranks do not come at once (``_exchanged``).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.runtime.cores import give_way

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

# What gloo sums; anything else is sent as this.
NOT_SUMMED_BY_GLOO = {torch.bool: torch.uint8, torch.int16: torch.int32}

# Of messages that one rank sends another within an exchange; transfers have tags below it.
EXCHANGE_TAG = 2**31 - 1

# What ``is_gloo`` found: ``torch.distributed`` takes as long to say it as to copy a small message.
_BY_GLOO: WeakKeyDictionary[ProcessGroup, bool] = WeakKeyDictionary()


class Pending:
    """Works under way, and what remains to be done locally once they are complete.

    ``lent`` are the tensors that a thread of the backend holds besides, and nobody else.
    """

    __slots__ = ("_finish", "lent", "result", "works")
    # Whether to wait until the backend has let go of them too: see ``alone_after_waiting``.
    returns_lent = False

    def __init__(
        self,
        works: Sequence[Work],
        result: Tensor,
        finish: Callable[[], None] | None = None,
        lent: Sequence[Tensor] = (),
    ) -> None:
        self.works = works
        self.result = result
        self._finish = finish
        self.lent = lent

    def wait(self) -> Tensor:
        """Block until complete and return the result buffer."""
        for work in self.works:
            work.wait()
            del work  # it holds tensors, too
        self.works = ()
        if Pending.returns_lent:
            self._take_back()
        self.lent = ()
        if self._finish is not None:
            self._finish()
        self._finish = None
        return self.result

    def _take_back(self) -> None:
        """Wait, at most some seconds, until the backend holds no bytes of what was lent.

        The bytes' holders are counted, not the tensors': a thread that has let go of its tensor may
        still have to wait for the interpreter to drop the Python object, and then the bytes.
        """
        # Held until the end, so that it is this thread which frees the bytes, and is heard.
        storages = [tensor.untyped_storage() for tensor in self.lent]
        lent = Counter(storage._cdata for storage in storages)
        holders = {of: torch._C._storage_Use_Count(of) - count for of, count in lent.items()}
        self.lent = ()
        deadline = time.monotonic() + 5.0
        for of, count in holders.items():
            while torch._C._storage_Use_Count(of) > count and time.monotonic() < deadline:
                time.sleep(1e-5)


@contextmanager
def alone_after_waiting() -> Generator[None]:
    """While this lasts, what was waited for is held by no thread of the backend any more.

    A thread of gloo tells that a work is complete just before it lets go of the work's tensors. If
    it is the last to hold them it frees them, which the profiler, listening to the caller's thread,
    does not hear.
    """
    Pending.returns_lent = True
    try:
        yield
    finally:
        Pending.returns_lent = False


def _started(
    works: Sequence[Work],
    result: Tensor,
    group: ProcessGroup,
    finish: Callable[[], None] | None = None,
    lent: Sequence[Tensor] = (),
) -> Pending:
    """Return works that have something to send as under way, once gloo's threads have had the core to begin it."""
    _give_way(group)
    return Pending(works, result, finish, lent)


def _give_way(group: ProcessGroup) -> None:
    """Give way to gloo's threads, where it is gloo that is called."""
    if is_gloo(group):
        give_way()


def is_gloo(group: ProcessGroup) -> bool:
    """Whether the group's tensors on the host travel by gloo."""
    known = _BY_GLOO.get(group)
    if known is None:
        known = _BY_GLOO[group] = "gloo" in dist.get_backend(group)
    return known


def all_reduce(buffer: Tensor, group: ProcessGroup) -> Pending:
    """Sum a buffer over the group, in place."""
    wire = NOT_SUMMED_BY_GLOO.get(buffer.dtype)
    widened = buffer if wire is None else buffer.to(wire)
    lent = widened.detach()
    options = dist.AllreduceOptions()
    options.asyncOp = True
    work = group.allreduce([_real(lent)], options)
    finish = None if wire is None else lambda: _store(buffer, widened)
    return _started((work,), buffer, group, finish, (lent,))


def _exchanged(
    come: Mapping[int, Tensor], go: Mapping[int, Tensor], group: ProcessGroup
) -> list[Work]:
    """Start receiving and sending flat tensors, by rank of the group: what is to come is asked for first.

    One thread of gloo's reads and writes. Of two ranks the one that is late would push all it has before
    it says that it is ready to receive; the other's, which waits for that word, would travel afterwards.

    Before, the thread gives way: gloo's, which would be scheduled in the midst of a call, turns in circles around
    what that call has locked (decision 0109).

    The group is asked itself, here, for sums and for transfers: what ``torch.distributed`` checks in Python, every
    time, takes a quarter of what a small message takes of the thread that computes.
    """
    give_way()
    works = [group.recv([_real(one)], rank, EXCHANGE_TAG) for rank, one in come.items()]
    return works + [group.send([_real(one)], rank, EXCHANGE_TAG) for rank, one in go.items()]


def _real(tensor: Tensor) -> Tensor:
    """Return a tensor as what travels."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _rows_exchanged(output: Tensor, pieces: Tensor, group: ProcessGroup) -> list[Work]:
    """Start an exchange of equal pieces of flat tensors: the r-th goes to rank r, whose own becomes the r-th.
    A rank's own piece stays."""
    ranks, rank = group.size(), group.rank()
    come, go = output.view(ranks, -1).unbind(), pieces.view(ranks, -1).unbind()
    # Each begins with the rank behind it: not all with one.
    behind = [(rank + step) % ranks for step in range(1, ranks)]
    sources = {other: come[other] for other in behind[::-1]}
    return _exchanged(sources, {other: go[other] for other in behind}, group)


def _store(buffer: Tensor, value: Tensor) -> None:
    buffer.copy_(value)


def all_gather(output: Tensor, piece: Tensor, group: ProcessGroup) -> Pending:
    """Collect every rank's flat piece, in group order, into a flat output; it may lie there already."""
    if not is_gloo(group):
        work = dist.all_gather_single(output, piece, group=group, async_op=True)
        return Pending((work,), output)  # type: ignore[arg-type]
    lent, ranks = output.detach(), group.size()
    own = lent.view(ranks, -1)[group.rank()]
    if own.data_ptr() != piece.data_ptr():
        own.copy_(piece)
    works = _rows_exchanged(lent, own.expand(ranks, -1), group)
    return _started(works, output, group, lent=(lent,))


def reduce_scatter(output: Tensor, whole: Tensor, group: ProcessGroup) -> Pending:
    """Sum flat buffers over the group; rank r keeps the r-th of its equal pieces in ``output``."""
    if not is_gloo(group):
        work = dist.reduce_scatter_single(output, whole, group=group, async_op=True)
        return Pending((work,), output)  # type: ignore[arg-type]
    terms = torch.empty_like(whole)
    lent = (terms.detach(), whole.detach())
    works = _rows_exchanged(*lent, group)
    # Not of what is lent, which a view of it would hold.
    rank, (rows, own) = group.rank(), (one.view(group.size(), -1) for one in (terms, whole))

    def add_up() -> None:
        if len(rows) == 2 and output.dtype is whole.dtype:
            torch.add(own[rank], rows[1 - rank], out=output)
            return
        rows[rank].copy_(own[rank])
        torch.sum(rows, 0, dtype=output.dtype, out=output)

    return _started(works, output, group, add_up, lent)


def all_to_all(output: Tensor, pieces: Tensor, group: ProcessGroup) -> Pending:
    """Send the r-th of the buffer's equal pieces to rank r; one from every rank comes back."""
    lent = (output.detach(), pieces.detach())
    if is_gloo(group):
        kept, own = (one.view(group.size(), -1)[group.rank()] for one in lent)
        kept.copy_(own)
        return _started(_rows_exchanged(*lent, group), output, group, lent=lent)
    work = dist.all_to_all_single(*lent, group=group, async_op=True)
    return Pending((work,), output, lent=lent)  # type: ignore[arg-type]


def swap(output: Tensor, tensor: Tensor, rank: int, group: ProcessGroup) -> Pending:
    """Start sending a contiguous tensor to a rank of the world and receiving its own of the same form."""
    lent = (output.detach(), tensor.detach())
    if is_gloo(group):
        other = dist.get_group_rank(group, rank)
        works = _exchanged({other: lent[0]}, {other: lent[1]}, group)
        return _started(works, output, group, lent=lent)
    theirs, mine = map(_real, lent)
    both = [dist.P2POp(dist.isend, mine, rank, group), dist.P2POp(dist.irecv, theirs, rank, group)]
    return Pending(dist.batch_isend_irecv(both), output, lent=lent)


def send(tensor: Tensor, rank: int, group: ProcessGroup, tag: int) -> Pending:
    """Start sending a contiguous tensor to a rank of the world."""
    lent = tensor.detach()
    _give_way(group)
    work = group.send([_real(lent)], dist.get_group_rank(group, rank), tag)
    return _started((work,), tensor, group, lent=(lent,))


def receive(tensor: Tensor, rank: int, group: ProcessGroup, tag: int) -> Pending:
    """Start receiving into a contiguous tensor from a rank of the world."""
    lent = tensor.detach()
    _give_way(group)
    work = group.recv([_real(lent)], dist.get_group_rank(group, rank), tag)
    return Pending((work,), tensor, lent=(lent,))
