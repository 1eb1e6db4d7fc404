"""What the blocks of a class may do about their activations: keep them, or make them again.

One decision per class of equal blocks, among a few modes. Dropping re-laid-out copies only is the
cheapest way to give memory back where there is tensor parallelism, dropping what costs little to
make the next, recomputing the whole block the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from shardwright.core.strategy import Mesh, Strategy
from shardwright.planner.model.context import Context


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """``operators`` run again; ``copies``: so do messages whose results backward needs; ``whole``:
    the block keeps nothing but what others hand to it. Of these operators the ``idle`` make nothing
    that a backward needs (``needed_again``).
    """

    name: str
    operators: frozenset[int] = frozenset()
    copies: bool = False
    whole: bool = False
    idle: frozenset[int] = frozenset()

    def repeats(self, operator: int) -> bool:
        """Whether an operator of the block runs again in backward."""
        return (self.whole or operator in self.operators) and operator not in self.idle


KEEP = Mode(name="keep")
COPIES = Mode(name="re-gather activations in backward", copies=True)
WHOLE = Mode(name="recompute", copies=True, whole=True)


def find_modes(context: Context, mesh: Mesh) -> tuple[Mode, ...]:
    """Return the modes to choose from, ``KEEP`` first unless something else was asked for."""
    wanted = context.training.recompute
    whole = replace(WHOLE, idle=context.facts.idle(frozenset(range(len(context.graph.operators)))))
    if wanted == "blocks":
        return (whole,)
    if wanted == "selective" or wanted == "attention":  # noqa: PLR1714 - the type narrows so
        return (_named(context, wanted),)
    pairs = zip(mesh.axes, mesh.sizes, strict=True)
    is_split = any(size > 1 and axis != "data" for axis, size in pairs)
    found = (KEEP, COPIES) if is_split else (KEEP,)
    if wanted == "none":
        return found
    some = _named(context, "selective")
    return (*found, some, whole) if some.operators else (*found, whole)


def _named(context: Context, name: Literal["selective", "attention"]) -> Mode:
    again = context.facts.recomputed(name)
    return Mode(
        name=f"recompute ({name})",
        operators=again,
        copies=name == "selective",
        idle=context.facts.idle(again),
    )


def in_modes(context: Context, strategy: Strategy, modes: Sequence[Mode]) -> Strategy:
    """Return the strategy with every block (of ``ties.ranges``) in its mode."""
    ties = context.facts.ties
    dropping = {block for block, mode in enumerate(modes) if mode.copies and not mode.whole}
    return replace(
        strategy,
        recompute=tuple(ties.number[block] for block, mode in enumerate(modes) if mode.whole),
        recompute_operators=tuple(
            index for index, block in enumerate(ties.block) if index in modes[block].operators
        ),
        reshard_again=_copied_in(context, dropping) if dropping else (),
    )


def _copied_in(context: Context, dropping: set[int]) -> tuple[int, ...]:
    """Return the tensors of which some blocks, each of them all readers' one, would keep a copy."""
    graph, ties, saves = context.graph, context.facts.ties, context.facts.saves
    found: list[int] = []
    for tensor, spec in enumerate(graph.tensors):
        if spec.producer >= 0 and saves.kept_below[tensor]:
            blocks = {ties.block[reader] for reader in graph.consumers[tensor]}
            is_inside = len(blocks) == 1 and blocks <= dropping
            if is_inside and not context.facts.is_once(spec.producer):
                found.append(tensor)
    return tuple(found)
