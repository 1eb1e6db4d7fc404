"""PyTorch's caching allocator on an accelerator: what it reserves for tensors that come and go.

As ``c10/cuda/CUDACachingAllocator.cpp`` does: sizes are rounded to 512 bytes; up to 1 MiB is cut from
segments of 2 MiB, up to 10 MiB from segments of 20 MiB, more gets a segment of its own in steps of
2 MiB. A request takes the smallest free block that is large enough and gives back the rest of it if
that is more than 1 MiB (512 bytes of small blocks); neighbours within a segment merge again, different
segments never do. So what was cut for small tensors serves no larger one, and remains reserved.
Without ``expandable_segments``, which are off unless asked for. Where the device has no more memory, the
segments that lie free as a whole are given back first, those of other streams too.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from dataclasses import dataclass, field

MIB = 2**20
STEP, SMALL = 512, MIB
SMALL_SEGMENT, LARGE_SEGMENT, ALONE = 2 * MIB, 20 * MIB, 10 * MIB


@dataclass(eq=False, slots=True)
class Block:
    """A piece of a segment; ``wanted`` are the bytes that were asked for, rounded."""

    size: int
    number: int
    is_small: bool
    wanted: int = 0
    is_free: bool = False
    before: Block | None = None
    after: Block | None = None

    @property
    def is_alone(self) -> bool:
        """Whether it is a whole segment."""
        return self.before is None and self.after is None


@dataclass(slots=True)
class DeviceMemory:
    """The bytes that the allocators of a device may reserve together; ``is_short``: they needed more."""

    limit: float = math.inf
    is_short: bool = False
    allocators: list[CachingAllocator] = field(default_factory=list["CachingAllocator"])

    def make_room(self, size: int) -> None:
        """Let every allocator give back what lies free if so many bytes are not there."""
        if sum(one.reserved for one in self.allocators) + size <= self.limit:
            return
        for one in self.allocators:
            one.release()
        left = sum(one.reserved for one in self.allocators)
        self.is_short = self.is_short or left + size > self.limit


@dataclass(slots=True)
class CachingAllocator:
    """One device's allocator on one stream; ``allocated`` and ``reserved`` in bytes."""

    memory: DeviceMemory = field(default_factory=DeviceMemory)
    allocated: int = 0
    reserved: int = 0
    _count: int = 0
    # By pool (large, small): free blocks as (size, number, block), smallest first.
    _free: tuple[list[tuple[int, int, Block]], list[tuple[int, int, Block]]] = field(
        default_factory=lambda: ([], [])
    )

    def __post_init__(self) -> None:
        self.memory.allocators.append(self)

    def take(self, size: int) -> Block:
        """Return a block of at least so many bytes."""
        wanted = max(STEP, -(-size // STEP) * STEP)
        is_small = wanted <= SMALL
        free = self._free[is_small]
        place = bisect_left(free, (wanted,))
        block = free.pop(place)[2] if place < len(free) else self._segment(wanted, is_small)
        rest = block.size - wanted
        if rest > SMALL or (is_small and rest >= STEP):
            block.size = wanted
            self._put(self._new(rest, is_small, block))
        block.is_free, block.wanted = False, wanted
        self.allocated += wanted
        return block

    def give(self, block: Block) -> None:
        """Take a block back, and merge it with its free neighbours."""
        self.allocated -= block.wanted
        before, after = block.before, block.after
        if before is not None and before.is_free:
            self._remove(before)
            block = self._join(before, block)
        if after is not None and after.is_free:
            self._remove(after)
            block = self._join(block, after)
        self._put(block)

    def release(self) -> None:
        """Give back the segments that lie free as a whole."""
        for free in self._free:
            self.reserved -= sum(block.size for _, _, block in free if block.is_alone)
            free[:] = [entry for entry in free if not entry[2].is_alone]

    def _segment(self, wanted: int, is_small: bool) -> Block:
        """Ask the device for memory."""
        size = SMALL_SEGMENT if is_small else LARGE_SEGMENT
        if wanted >= ALONE:
            size = -(-wanted // SMALL_SEGMENT) * SMALL_SEGMENT
        self.memory.make_room(size)
        self.reserved += size
        return self._new(size, is_small, None)

    def _new(self, size: int, is_small: bool, before: Block | None) -> Block:
        self._count += 1
        block = Block(size, self._count, is_small, before=before)
        if before is not None:
            block.after, before.after = before.after, block
            if block.after is not None:
                block.after.before = block
        return block

    def _join(self, block: Block, after: Block) -> Block:
        """Let a block have the memory of the one behind it."""
        block.size += after.size
        block.after = after.after
        if block.after is not None:
            block.after.before = block
        return block

    def _put(self, block: Block) -> None:
        block.is_free = True
        insort(self._free[block.is_small], (block.size, block.number, block))

    def _remove(self, block: Block) -> None:
        free = self._free[block.is_small]
        free.pop(bisect_left(free, (block.size, block.number)))
