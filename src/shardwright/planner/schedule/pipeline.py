"""The order of a pipeline as data: for every crew of devices a list of forwards and backwards.

A *crew* are the devices of the same meshes; a crew of several meshes holds several chunks of the
model. Named generators make the lists (``generators.pipeline_order``), a user may write one
(``written``), and ``global_order`` merges them into the one order in which a Program lists its
instructions. A backward is one action B, or I (the gradient of the input) and W (that of the weights).

What every order must keep, so that it can be lowered: every mesh runs the forward and the backward
of every microbatch once, all meshes run the microbatches' forwards in one order, and their backwards
in one order. So links carry messages in the order in which they are awaited, and all meshes agree on
the last backward, the one with the steps that run once (the synchronisation of gradients).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Sequence
from itertools import islice
from typing import Literal, NamedTuple, cast

Phase = Literal["F", "B", "I", "W"]
Crews = tuple[tuple[int, ...], ...]
GROWTH: dict[Phase, int] = {"F": 1, "B": -1, "I": 0, "W": -1}  # of the microbatches held
# Longest line of an order that a message shows.
SHOWN = 60
MOST_NAMED = SHOWN // 4  # actions that one names


class Action(NamedTuple):
    """One phase of one microbatch on one mesh; ``str`` writes it as ``2F0``."""

    mesh: int
    phase: Phase
    microbatch: int

    def __str__(self) -> str:
        return f"{self.mesh}{self.phase}{self.microbatch}"


Line = tuple[Action, ...]


class OrderError(ValueError):
    """What is wrong with an order, what to do, and in which row, counted from 0."""

    def __init__(self, problem: str, remedy: str, row: int | None = None) -> None:
        super().__init__(f"{problem}{'' if row is None else f' (row {row})'}; {remedy}")
        self.problem, self.remedy, self.row = problem, remedy, row


def alone(num_stages: int) -> Crews:
    """Return crews of one stage each."""
    return tuple((stage,) for stage in range(num_stages))


def halved(line: Line) -> Line:
    """Return a line with every whole backward as its two halves, one behind the other."""
    found: list[Action] = []
    for action in line:
        phases: tuple[Phase, ...] = ("I", "W") if action.phase == "B" else (action.phase,)
        found += [action._replace(phase=phase) for phase in phases]
    return tuple(found)


def written(text: Sequence[str]) -> tuple[Line, ...]:
    """Read an order: a line per crew of actions such as ``2F0`` and ``1B3``, parted by spaces.

    Raises OrderError where something else is written.
    """
    return tuple(
        tuple(_action(word, row) for word in line.split()) for row, line in enumerate(text)
    )


def _action(word: str, row: int) -> Action:
    found = re.fullmatch(r"([0-9]{1,6})([FBIW])([0-9]{1,6})", word)
    if not found:
        raise OrderError(
            "an action is a mesh, F, B, I or W, and a microbatch, such as 2F0 or 1B3, not "
            f"{word[:SHOWN]!r}",
            "correct it",
            row,
        )
    return Action(int(found[1]), cast(Phase, found[2]), int(found[3]))


def check_order(lines: Sequence[Line], crews: Crews, num_microbatches: int) -> None:
    """Raise OrderError where an order is not complete, or not one that lowering can take.

    ``crews`` are the meshes of each; none where lines themselves say which lie together. Every crew has a
    line, in any order of lines. See the head of this module for the rules.
    """
    own = meshes_of(lines)
    most = max((mesh for some in own for mesh in some), default=-1)
    meshes = frozenset(mesh for crew in crews for mesh in crew) or frozenset(range(1 + most))
    _check_complete(lines, meshes, num_microbatches)
    _check_rows(own, crews or own)
    _check_sequences(lines)
    global_order(lines)


def _check_complete(lines: Sequence[Line], meshes: frozenset[int], num_microbatches: int) -> None:
    """Check that lines have every action of these meshes once, and no others."""
    row = {action: number for number, line in enumerate(lines) for action in line}
    row_of = {action.mesh: number for action, number in row.items()}
    listed = Counter(action for line in lines for action in line)
    # Few are named, and where few are missing there are about as many as the file lists: a number of
    # microbatches that nobody wrote out takes no time.
    missing = (
        action
        for mesh in sorted(meshes)
        for microbatch in range(num_microbatches)
        for phase in phases_of(row, mesh, microbatch)
        if (action := Action(mesh, phase, microbatch)) not in listed
    )

    def is_there(action: Action) -> bool:
        return action.mesh in meshes and action.microbatch < num_microbatches

    whole = [a for a in listed if a.phase not in phases_of(row, a.mesh, a.microbatch)]
    for what, some in (
        ("names actions that there are not", [a for a in listed if not is_there(a)]),
        ("has B beside I or W", whole),
        ("lacks actions", list(islice(missing, MOST_NAMED + 1))),
        ("lists actions twice", sorted(a for a, times in listed.items() if times > 1)),
    ):
        if some:
            at = row.get(some[0], row_of.get(some[0].mesh))
            raise OrderError(
                "an order has F, and B or I and W, of every microbatch on every mesh once, "
                f"{len(meshes)} meshes and {num_microbatches} microbatches, but this one "
                f"{what}: {_named(some)}",
                "correct it",
                at,
            )


def _check_rows(own: Crews, crews: Crews) -> None:
    """Check that the meshes of each line are those of a crew."""
    row_of: dict[int, int] = {}
    for row, mesh in ((row, mesh) for row, some in enumerate(own) for mesh in some):
        if row_of.setdefault(mesh, row) != row:
            raise OrderError(
                f"all actions of a mesh stand in one line, that of its devices, but those of mesh {mesh} stand in "
                "several",
                "join them",
                row,
            )
    wanted, found = (sorted(map(sorted, some)) for some in (crews, own))
    if wanted != found:
        strays = [row for row, some in enumerate(own) if list(some) not in wanted]
        raise OrderError(
            f"an order has one line per crew of devices, with all of their meshes, {wanted}, but "
            f"these lines are of meshes {found}",
            "join or part lines",
            strays[0] if strays else None,
        )


def meshes_of(lines: Sequence[Line]) -> Crews:
    """Return the meshes whose actions each line lists."""
    return tuple(tuple(sorted({action.mesh for action in line})) for line in lines)


def phases_of(listed: Container[Action], mesh: int, microbatch: int) -> tuple[Phase, ...]:
    """Return what a microbatch does on a mesh: split where a part of its backward is listed."""
    parts = (Action(mesh, "I", microbatch), Action(mesh, "W", microbatch))
    return ("F", "I", "W") if any(part in listed for part in parts) else ("F", "B")


def _check_sequences(lines: Sequence[Line]) -> None:
    for phase in ("F", "B"):
        sequences: dict[int, list[int]] = {}
        for action in [a for line in lines for a in map(handing, line) if a.phase == phase]:
            sequences.setdefault(action.mesh, []).append(action.microbatch)
        first = min(sequences)
        for mesh, sequence in sequences.items():
            if sequence != sequences[first]:
                name = "forwards" if phase == "F" else "backwards"
                raise OrderError(
                    f"all meshes run the {name} of microbatches in one order, since links keep it "
                    "and the last backward synchronises gradients, but mesh "
                    f"{first} runs {_numbers(sequences[first])} and mesh {mesh} "
                    f"{_numbers(sequence)}",
                    "make them equal",
                    [mesh in some for some in meshes_of(lines)].index(True),
                )


def _named(actions: Sequence[object]) -> str:
    text = " ".join(map(str, actions[:MOST_NAMED]))
    return text + (" ..." if len(actions) > MOST_NAMED else "")


def _numbers(sequence: Sequence[int]) -> str:
    return ",".join(map(str, sequence))[:SHOWN]


def global_order(lines: Sequence[Line], travel: int = 0) -> list[Action]:
    """Merge the crews' orders into one list.

    The list keeps every crew's own order, and F(s, m) follows F(s-1, m), B(s, m) follows B(s+1, m)
    and F(s, m), W(s, m) follows I(s, m), which else is as B. Crews take turns, so that the list reads roughly in time order; what one crew hands
    to another arrives ``travel`` turns later. Raises OrderError when no such list exists: run as they
    stand, the orders would wait for each other for ever.
    """
    num_meshes = 1 + max((action.mesh for line in lines for action in line), default=-1)
    merged, is_whole, place = _merged(lines, num_meshes, travel)
    if not is_whole:
        left = {
            row: line[at:]
            for row, (line, at) in enumerate(zip(lines, place, strict=True))
            if at < len(line)
        }
        # One that waits for what is behind it in its own row is at fault, whatever the others wait for.
        at_fault = [
            row
            for row, rest in left.items()
            if not set(needs(rest[0], num_meshes)).isdisjoint(map(handing, rest))
        ]
        raise OrderError(
            "pipeline stages wait for each other: none of the next actions "
            f"{_named([rest[0] for rest in left.values()])} (mesh, phase, microbatch) can start",
            "reorder them so that every F(s, m) can follow F(s-1, m), every B(s, m) or I(s, m) follows B(s+1, m) or "
            "I(s+1, m) and F(s, m), and every W(s, m) follows I(s, m)",
            min(at_fault or left),
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
        done.update(dict.fromkeys(map(handing, ready), turn))
        merged += ready
        turn += 1
        idle = 0 if ready else idle + 1
    return merged, len(merged) == total, place


def merges(lines: Sequence[Line], num_meshes: int) -> bool:
    """Whether crews that run these lines come to their ends."""
    return _merged(lines, num_meshes, 0)[1]


def handing(action: Action) -> Action:
    """Return an action as those that read what it makes name it: I hands on what B does."""
    return action._replace(phase="B") if action.phase == "I" else action


def needs(action: Action, num_meshes: int) -> tuple[Action, ...]:
    """Return what must have run before an action may start, B standing for B or I."""
    mesh, phase, microbatch = action
    if phase == "F":
        return (Action(mesh - 1, "F", microbatch),) if mesh > 0 else ()
    if phase == "W":
        return (Action(mesh, "B", microbatch),)
    own = Action(mesh, "F", microbatch)
    if mesh == num_meshes - 1:
        return (own,)
    return own, Action(mesh + 1, "B", microbatch)


def held(lines: Sequence[Line]) -> dict[int, int]:
    """Return how many microbatches' activations every mesh holds at most, each from F to B or W."""
    alive, most = dict[int, int](), dict[int, int]()
    for line in lines:
        for mesh, phase, _ in line:
            alive[mesh] = alive.get(mesh, 0) + GROWTH[phase]
            most[mesh] = max(most.get(mesh, 0), alive[mesh])
    return most


def most_bytes(
    lines: Sequence[Line], kept: Sequence[float], left: Sequence[float]
) -> tuple[float, ...]:
    """Return what the activations of every line take at most, in the units of ``kept`` and ``left``:
    what a mesh keeps of a microbatch from F to B or I, and what of that stays until W."""
    peaks: list[float] = []
    for line in lines:
        alive = peak = 0.0
        for mesh, phase, _ in line:
            whole, rest = kept[mesh], left[mesh]
            alive += {"F": whole, "B": -whole, "I": rest - whole, "W": -rest}[phase]
            peak = max(peak, alive)
        peaks.append(peak)
    return tuple(peaks)
