"""The order of a pipeline as data: for every crew of devices a list of forwards and backwards.

A *crew* are the devices of the same meshes; a crew of several meshes holds several chunks of the
model. Named generators make the lists (``pipeline_order``), a user may write one (``written``), and
``global_order`` merges them into the one order in which a Program lists its instructions.

What every order must keep, so that it can be lowered: every mesh runs the forward and the backward
of every microbatch once, all meshes run the microbatches' forwards in one order, and their backwards
in one order. So links carry messages in the order in which they are awaited, and all meshes agree on
the last backward, the one with the steps that run once (the synchronisation of gradients).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from shardwright.core.schedules import NAMED, ScheduleName

Phase = Literal["F", "B"]
Crews = tuple[tuple[int, ...], ...]
# Longest line of an order that a message shows.
SHOWN = 60


class Action(NamedTuple):
    """The forward or backward of one microbatch on one mesh; ``str`` writes it as ``2F0``."""

    mesh: int
    phase: Phase
    microbatch: int

    def __str__(self) -> str:
        return f"{self.mesh}{self.phase}{self.microbatch}"


Line = tuple[Action, ...]


def pipeline_order(
    schedule: ScheduleName,
    num_stages: int,
    num_microbatches: int,
    crews: Crews | None = None,
) -> tuple[Line, ...]:
    """Return the actions of every crew in the order they run; without ``crews`` each stage is one.

    ``gpipe``: every forward, then every backward, both by ascending microbatch. ``1f1b`` (DAPPLE,
    PipeDream-Flush): stage k of p runs p-1-k forwards ahead, then one forward and one backward in
    turn, then the remaining backwards; it keeps at most p-k microbatches alive. ``1f1b-so`` (BaPipe)
    runs twice as many ahead, so that a transfer has an action to hide behind. These take every stage
    as a crew. ``interleaved`` (Megatron-LM): see ``_interleaved``.
    """
    if num_stages < 1 or num_microbatches < 1:
        raise ValueError(
            f"a pipeline needs at least one stage and one microbatch, not {num_stages} and "
            f"{num_microbatches}; raise both to 1 or more"
        )
    if schedule == "interleaved":
        return _interleaved(crews or alone(num_stages), num_stages, num_microbatches)
    if schedule not in GENERATORS:
        known = ", ".join(repr(name) for name in NAMED)
        raise ValueError(f"schedule {schedule!r} is unknown; choose {known}")
    ahead = GENERATORS[schedule]
    every = range(num_microbatches)
    lines: list[Line] = []
    for stage in range(num_stages):
        forwards, backwards = ([Action(stage, phase, m) for m in every] for phase in PHASES)
        lines.append(_alternate(forwards, backwards, ahead(num_stages - 1 - stage, len(every))))
    return tuple(lines)


PHASES: tuple[Phase, Phase] = ("F", "B")
# How many forwards a stage with so many behind it runs ahead, of so many microbatches.
GENERATORS: dict[str, Callable[[int, int], int]] = {
    "gpipe": lambda behind, most: most,
    "1f1b": min,
    "1f1b-so": lambda behind, most: min(2 * behind, most),
}


def alone(num_stages: int) -> Crews:
    """Return crews of one stage each."""
    return tuple((stage,) for stage in range(num_stages))


def _alternate(forwards: Sequence[Action], backwards: Sequence[Action], ahead: int) -> Line:
    """Run so many forwards ahead, then forward and backward in turn, then what is left."""
    order = list(forwards[:ahead])
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        order += [forward, backward]
    return (*order, *backwards[len(forwards) - ahead :])


def _interleaved(crews: Crews, num_stages: int, num_microbatches: int) -> tuple[Line, ...]:
    """Return the order of Narayanan et al. (SC 2021): chunk by chunk, a group of microbatches each.

    A group has as many microbatches as there are crews, the last what is left. Crew k of p, with v
    chunks, runs 2 (p-1-k) + (v-1) g forwards ahead, g the size of the first group; with one chunk
    each, p-1-k as ``1f1b`` does. Where crews differ or a group is short that may be too few for any
    order at all: then every crew runs one more ahead, until there is one.
    """
    size = min(len(crews), num_microbatches)
    most = max(map(len, crews))
    groups = [
        range(first, min(first + len(crews), num_microbatches))
        for first in range(0, num_microbatches, len(crews))
    ]
    for more in range(num_stages * num_microbatches + 1):
        lines: list[Line] = []
        for place, own in enumerate(crews):
            behind = len(crews) - 1 - place
            ahead = more + (2 * behind + (len(own) - 1) * size if most > 1 else behind)
            up, down = sorted(own), sorted(own, reverse=True)
            forwards = [Action(c, "F", m) for group in groups for c in up for m in group]
            backwards = [Action(c, "B", m) for group in groups for c in down for m in group]
            lines.append(_alternate(forwards, backwards, min(ahead, len(forwards))))
        if _merged(lines, num_stages, 0)[1]:
            return tuple(lines)
    raise AssertionError("all forwards before all backwards is always an order")


def written(text: Sequence[str]) -> tuple[Line, ...]:
    """Read an order: a line per crew of actions such as ``2F0`` and ``1B3``, parted by spaces.

    Raises ValueError where something else is written.
    """
    return tuple(tuple(_action(word) for word in line.split()) for line in text)


def _action(word: str) -> Action:
    found = re.fullmatch(r"(\d{1,6})([FB])(\d{1,6})", word)
    if not found:
        raise ValueError(
            f"an action is a mesh, F or B, and a microbatch, such as 2F0 or 1B3, not "
            f"{word[:SHOWN]!r}; correct it"
        )
    return Action(int(found[1]), "F" if found[2] == "F" else "B", int(found[3]))


def check_order(lines: Sequence[Line], crews: Crews, num_microbatches: int) -> None:
    """Raise ValueError where an order is not complete, or not one that lowering can take.

    ``crews`` are the meshes of each; every crew has a line, in any order of lines. See the head of
    this module for the rules.
    """
    known = {
        Action(mesh, phase, microbatch)
        for crew in crews
        for mesh in crew
        for phase in PHASES
        for microbatch in range(num_microbatches)
    }
    listed = [action for line in lines for action in line]
    for what, some in (
        ("names actions that there are not", [a for a in listed if a not in known]),
        ("lacks actions", sorted(known.difference(listed))),
        ("lists actions twice", sorted({a for a in listed if listed.count(a) > 1})
            if len(listed) > len(set(listed)) else []),
    ):  # fmt: skip
        if some:
            raise ValueError(
                f"an order has F and B of every microbatch on every mesh once, {sum(map(len, crews))} "
                f"meshes and {num_microbatches} microbatches, but this one {what}: "
                f"{_named(some)}; correct it"
            )
    wanted = sorted(map(sorted, crews))
    found = sorted(sorted({action.mesh for action in line}) for line in lines)
    if wanted != found:
        raise ValueError(
            f"an order has one line per crew of devices, with all of their meshes, {wanted}, but "
            f"these lines are of meshes {found}; join or part lines"
        )
    _check_sequences(lines)
    global_order(lines)


def _check_sequences(lines: Sequence[Line]) -> None:
    for phase in PHASES:
        sequences: dict[int, list[int]] = {}
        for action in [action for line in lines for action in line if action.phase == phase]:
            sequences.setdefault(action.mesh, []).append(action.microbatch)
        first = min(sequences)
        for mesh, sequence in sequences.items():
            if sequence != sequences[first]:
                name = "forwards" if phase == "F" else "backwards"
                raise ValueError(
                    f"all meshes run the {name} of microbatches in one order, since links keep it "
                    "and the last backward synchronises gradients, but mesh "
                    f"{first} runs {_numbers(sequences[first])} and mesh {mesh} "
                    f"{_numbers(sequence)}; make them equal"
                )


def _named(actions: Sequence[Action]) -> str:
    text = " ".join(map(str, actions[: SHOWN // 4]))
    return text + (" ..." if len(actions) > SHOWN // 4 else "")


def _numbers(sequence: Sequence[int]) -> str:
    return ",".join(map(str, sequence))[:SHOWN]


def global_order(lines: Sequence[Line], travel: int = 0) -> list[Action]:
    """Merge the crews' orders into one list.

    The list keeps every crew's own order, and F(s, m) follows F(s-1, m), B(s, m) follows B(s+1, m)
    and F(s, m). Crews take turns, so that the list reads roughly in time order; what one crew hands
    to another arrives ``travel`` turns later. Raises ValueError when no such list exists: run as they
    stand, the orders would wait for each other for ever.
    """
    num_meshes = 1 + max((action.mesh for line in lines for action in line), default=-1)
    merged, is_whole, place = _merged(lines, num_meshes, travel)
    if not is_whole:
        stuck = [line[at] for line, at in zip(lines, place, strict=True) if at < len(line)]
        raise ValueError(
            f"pipeline stages wait for each other: none of the next actions {_named(stuck)} (mesh, "
            "phase, microbatch) can start; reorder them so that every F(s, m) can follow "
            "F(s-1, m) and every B(s, m) can follow B(s+1, m) and F(s, m)"
        )
    return merged


def _merged(
    lines: Sequence[Line], num_meshes: int, travel: int
) -> tuple[list[Action], bool, list[int]]:
    """Return the merged list as far as it goes, whether that is all, and how far every line came."""
    place = [0] * len(lines)
    crew_of = {action.mesh: number for number, line in enumerate(lines) for action in line}
    done: dict[Action, int] = {}
    merged: list[Action] = []
    total = sum(map(len, lines))
    turn = idle = 0
    while len(merged) < total and idle <= travel:
        ready: list[Action] = []
        for crew, line in enumerate(lines):
            if place[crew] == len(line):
                continue
            action = line[place[crew]]
            for other in needs(action, num_meshes):
                late = travel if crew_of.get(other.mesh) != crew else 0
                if done.get(other, turn) + late >= turn:
                    break
            else:
                ready.append(action)
                place[crew] += 1
        done.update(dict.fromkeys(ready, turn))
        merged += ready
        turn += 1
        idle = 0 if ready else idle + 1
    return merged, len(merged) == total, place


def needs(action: Action, num_meshes: int) -> tuple[Action, ...]:
    """Return what must have run before an action may start."""
    mesh, phase, microbatch = action
    if phase == "F":
        return (Action(mesh - 1, "F", microbatch),) if mesh > 0 else ()
    own = Action(mesh, "F", microbatch)
    if mesh == num_meshes - 1:
        return (own,)
    return own, Action(mesh + 1, "B", microbatch)


def held(lines: Sequence[Line]) -> dict[int, int]:
    """Return how many microbatches' activations every mesh holds at most."""
    alive, most = dict[int, int](), dict[int, int]()
    for line in lines:
        for mesh, phase, _ in line:
            alive[mesh] = alive.get(mesh, 0) + (1 if phase == "F" else -1)
            most[mesh] = max(most.get(mesh, 0), alive[mesh])
    return most
