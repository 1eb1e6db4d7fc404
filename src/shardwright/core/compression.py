"""How many bytes are left of a gradient that is compressed for the wire, and who sends them to whom."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Literal

from shardwright.core.graph import DTYPE_BYTES
from shardwright.core.strategy import REAL, Compressor, GradientSync

if TYPE_CHECKING:
    from shardwright.core.program import Transform, TransformName

# Smaller gradients (norms, biases) travel whole: starting to select costs more than sending them does.
WHOLE_BELOW = 1024
INDEX_BYTES = 4
Packing = Literal["top-k", "int8", "1-bit"]
# What a planner that may compress tries: compressors and densities.
MENU: tuple[tuple[Compressor, float], ...] = (
    ("int8", 1.0), ("1-bit", 1.0), ("top-k", 0.25), ("top-k", 0.1), ("top-k", 0.04), ("top-k", 0.01),
    ("top-k", 0.004), ("top-k", 0.001),
)  # fmt: skip
# And for all gradients alike: compressors of several messages, densities, and ranks of factors.
MENU_IN_ROUNDS: tuple[tuple[Compressor, float, int], ...] = (
    ("powersgd", 1.0, 4), ("powersgd", 1.0, 2), ("powersgd", 1.0, 1), ("gtop-k", 0.01, 1), ("gtop-k", 0.004, 1),
    ("gtop-k", 0.001, 1),
)  # fmt: skip
WHOLE: tuple[Compressor, float] = ("none", 1.0)
LEAST_SENT = 0.001  # where nobody says
# Densities of the first steps in Deep Gradient Compression (Lin et al., ICLR 2018).
WARM_UP = (0.25, 0.0625, 0.015625, 0.004)
# Compressors that send a density of the elements, and those of them that merge what they sent.
SPARSE: frozenset[str] = frozenset({"top-k", "gtop-k", "gtop-k-tree"})
MERGED: frozenset[str] = frozenset({"gtop-k", "gtop-k-tree"})
# Compressors of several messages that follow each other.
ROUNDS: frozenset[str] = MERGED | {"powersgd"}
# Transforms that read gradients to compress them.
PACKS: frozenset[TransformName] = frozenset({"top-k", "int8", "1-bit", "left factor"})


def packed_by(transform: Transform) -> tuple[int, ...]:
    """Return the gradients that a transform compresses: as many states of each kind come behind them."""
    return transform.reads[: len(transform.reads) // (1 + transform.count("states", 1))]


def kept_elements(density: float, elements: int) -> int:
    """Return how many elements top-k keeps."""
    return max(1, round(density * elements))


def at_step(sync: GradientSync, step: int) -> GradientSync:
    """Return how gradients travel in a step, counted from 0: denser while they warm up."""
    if not sync.feedback.warm_up or step >= sync.feedback.warm_up * len(WARM_UP):
        return sync
    least = WARM_UP[step // sync.feedback.warm_up]

    def denser(compressor: Compressor, density: float) -> float:
        return max(density, least) if compressor in SPARSE else density

    apart = tuple([(one, how, denser(how, share)) for one, how, share in sync.apart])
    return replace(sync, density=denser(sync.compressor, sync.density), apart=apart)


def packed_bytes(compressor: Compressor, density: float, elements: int, dtype: str) -> int:
    """Return the bytes that a device sends at once of so many elements: values of a dtype with 32-bit
    indices; a byte each and the size of a level; or a bit each and two means."""
    width = DTYPE_BYTES[dtype]
    if compressor in SPARSE:
        return kept_elements(density, elements) * (width + INDEX_BYTES)
    if compressor == "int8":
        return elements + width
    return -(-elements // 8) + 2 * width


def sent_share(compressor: Compressor, density: float, dtype: str) -> float:
    """Return the share of a gradient's bits that travel, places of elements and sizes of levels aside;
    ``density`` is that of the elements, or of those of factors, that do."""
    if compressor == "none":
        return 1.0
    bits = {"int8": 8.0, "1-bit": 1.0}.get(compressor)
    return density if bits is None else bits / (8 * DTYPE_BYTES[dtype])


def sent_density(sync: GradientSync, shape: tuple[int, ...]) -> float:
    """Return the share of elements that a device sends of its gradient of a shape."""
    if sync.compressor == "powersgd":
        return sum(map(math.prod, factor_shapes(shape, sync.feedback.rank))) / math.prod(shape)
    elements = math.prod(shape)
    return kept_elements(sync.density, elements) / elements


def factor_shapes(shape: tuple[int, ...], rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the shapes of PowerSGD's left and right factors of a gradient, seen as a matrix."""
    rows, columns = shape[0], math.prod(shape[1:])
    columns_kept = min(rows, columns, rank)
    return (rows, columns_kept), (columns, columns_kept)


def is_low_rank(shape: tuple[int, ...], rank: int) -> bool:
    """Tell whether two factors have less than half of a matrix's elements (torch's own rule)."""
    rows, columns = shape[0], math.prod(shape[1:])
    return 2 * (rows + columns) * rank < rows * columns


def wide_dtype(dtype: str) -> str:
    """Return the dtype in which gradients of a dtype are compressed and what that loses is kept."""
    return "float32" if DTYPE_BYTES[dtype] < DTYPE_BYTES["float32"] else dtype


def allowed_ways(least_sent: float, dtype: str) -> list[tuple[Compressor, float]]:
    """Return what of the menu sends at least a share of the bits of a dtype, densest first."""
    found = [(sent_share(*way, dtype), way) for way in MENU]
    return [way for share, way in sorted(found, reverse=True) if share >= least_sent]


def is_worth_packing(dtype: str, elements: int) -> bool:
    """Whether a device's gradient of a dtype and so many elements is compressed where anything is."""
    return dtype in REAL and elements >= WHOLE_BELOW


def is_compressed(sync: GradientSync, dtype: str, shape: tuple[int, ...]) -> bool:
    """Whether a device's gradient of a dtype and shape is compressed before it is summed."""
    if sync.compressor == "none" or not is_worth_packing(dtype, math.prod(shape)):
        return False
    is_matrix = len(shape) > 1 and is_low_rank(shape, sync.feedback.rank)
    return is_matrix if sync.compressor == "powersgd" else True


def allowed_in_rounds(
    sync: GradientSync, least_sent: float, dtype: str, shapes: Collection[tuple[int, ...]]
) -> list[tuple[float, GradientSync]]:
    """Return how gradients of a dtype and of shapes may travel in rounds of messages that send at least a share
    of the bits of each that they compress; with the least share that each does."""
    found = list[tuple[float, GradientSync]]()
    for compressor, density, rank in MENU_IN_ROUNDS:
        feedback = replace(sync.feedback, rank=rank)
        way = replace(sync, compressor=compressor, density=density, feedback=feedback)
        shares = [
            density if compressor in SPARSE else sent_density(way, shape)
            for shape in shapes
            if is_compressed(way, dtype, shape)
        ]
        if shares and min(shares) >= least_sent:
            found.append((min(shares), way))
    return found


@dataclass(frozen=True, slots=True)
class Round:
    """Messages that pass at once while selections are merged: ``pairs`` of places, (sender, receiver).

    Receivers merge what comes with what they hold, the lower place's first; or hold it instead, where it
    ``replaces`` that. Who swaps with another sees what merging drops of its own, and owes that; where nothing
    goes back the receiver owes what it drops, and answers for the rest.
    """

    pairs: tuple[tuple[int, int], ...]
    replaces: bool = False

    def sender_to(self, place: int) -> int:
        """Return who sends to a place, -1 for nobody."""
        return next((sender for sender, receiver in self.pairs if receiver == place), -1)

    def receiver_of(self, place: int) -> int:
        """Return to whom a place sends, -1 for nobody."""
        return next((receiver for sender, receiver in self.pairs if sender == place), -1)


@cache
def merge_rounds(compressor: str, ranks: int) -> tuple[Round, ...]:
    """Return how so many ranks merge their selections, so that all hold the same in the end.

    By recursive doubling: with ranks 1, 2, 4 ... away; those beyond a power of two go through another.
    Or along a binomial tree to the first and down again. Any number of ranks will do.
    """
    return _by_doubling(ranks) if compressor == "gtop-k" else _along_tree(ranks)


def _by_doubling(ranks: int) -> tuple[Round, ...]:
    power = 1 << (ranks.bit_length() - 1)
    strides = [1 << level for level in range(power.bit_length() - 1)]
    rounds = [
        Round(tuple([(place, place ^ stride) for place in range(power)])) for stride in strides
    ]
    if ranks == power:
        return tuple(rounds)
    inward = tuple([(place, place - power) for place in range(power, ranks)])
    outward = tuple([(receiver, sender) for sender, receiver in inward])
    return Round(inward), *rounds, Round(outward, replaces=True)


def _along_tree(ranks: int) -> tuple[Round, ...]:
    strides = [1 << level for level in range((ranks - 1).bit_length())]
    inward = [
        tuple([(place, place - stride) for place in range(stride, ranks, 2 * stride)])
        for stride in strides
    ]
    outward = [
        tuple([(receiver, sender) for sender, receiver in pairs]) for pairs in reversed(inward)
    ]
    return *map(Round, inward), *[Round(pairs, replaces=True) for pairs in outward]
