"""Devices that decide what to run whenever they are free: orders with a split backward from times.

A device runs the gradient of an input that has arrived, else a forward for which there is memory,
else W, unless what comes next would wait for it too long.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardwright.planner.schedule.clock import StageTimes
from shardwright.planner.schedule.pipeline import Action, Crews, Line, Phase, alone, most_bytes

ROUNDING = 1e-9
UNIT = StageTimes(forward=1.0, backward=1.0, weight=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What the activations of every device may take, in the units of what a mesh keeps of a
    microbatch: ``kept`` from F to I, and ``left`` of that from I to W."""

    limits: Sequence[float]
    kept: Sequence[float]
    left: Sequence[float]

    def fits(self, device: int, held: float, mesh: int) -> bool:
        """Whether a device that holds so much may begin another microbatch of a mesh."""
        return held + self.kept[mesh] <= self.limits[device] * (1 + ROUNDING)

    def added(self, mesh: int, phase: Phase) -> float:
        """Return by how much more is kept after an action."""
        whole, rest = self.kept[mesh], self.left[mesh]
        return {"F": whole, "B": -whole, "I": rest - whole, "W": -rest}[phase]

    def has(self, lines: Sequence[Line]) -> bool:
        """Whether an order stays within the limits."""
        peaks = most_bytes(lines, self.kept, self.left)
        return all(p <= limit * (1 + ROUNDING) for p, limit in zip(peaks, self.limits, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How devices decide: ``share`` see ``SHARES``; ``balances``: a device that has idled less than
    another waits; ``warmup``: the most forwards of each before its first I, and, ``paced``, one more for
    every I from there on; ``hurries``: these before I."""

    share: float = 1.0
    balances: bool = False
    paced: bool = False
    hurries: bool = False
    warmup: Sequence[int] = ()


def list_schedule(
    stages: Sequence[StageTimes],
    num_microbatches: int,
    room: Room,
    policy: Policy,
    *,
    crews: Crews = (),
    given: Sequence[Line] = (),
) -> tuple[tuple[Line, ...], float] | None:
    """Return the order that devices take which decide by a policy, and its longest span
    (``Replay.span``), or None where they get stuck.

    ``crews``: the meshes of each, one if not given. Where F and I are ``given`` in an order, only W
    is placed. O(actions log devices).
    """
    play = _Play(stages, num_microbatches, room, policy, crews or alone(len(stages)), given)
    while play.awake:
        time, device = heapq.heappop(play.awake)
        if play.free[device] > time:
            continue
        action, later = play.choose(device, time)
        if action is not None:
            play.run(device, action, time)
        elif later < math.inf:
            heapq.heappush(play.awake, (later, device))
    lines = tuple(map(tuple, play.lines))
    if sum(map(len, lines)) < 3 * len(stages) * num_microbatches:
        return None
    return lines, max(end - begin for end, begin in zip(play.free, play.begin, strict=True))


def with_weights_late(
    lines: Sequence[Line], num_stages: int, num_microbatches: int, crews: Crews
) -> tuple[Line, ...]:
    """Return an order of F, I and W in which W fills what would idle if all three took equally long, within
    the memory that the order takes as it is."""
    kept, left = [1.0] * num_stages, [0.5] * num_stages
    room = Room(limits=[max(most_bytes(lines, kept, left))] * len(crews), kept=kept, left=left)
    units = [UNIT] * num_stages
    placed = list_schedule(units, num_microbatches, room, Policy(), crews=crews, given=lines)
    return placed[0] if placed else tuple(lines)


def _without_weights(line: Line) -> list[Action]:
    return [action for action in line if action.phase in "FI"]


class _Play:
    """The state of devices that decide one after another in the order of time."""

    def __init__(
        self,
        stages: Sequence[StageTimes],
        count: int,
        room: Room,
        policy: Policy,
        crews: Crews,
        given: Sequence[Line],
    ) -> None:
        self.stages, self.room, self.policy, self.crews = stages, room, policy, crews
        self.home = {mesh: device for device, own in enumerate(crews) for mesh in own}
        self.done: dict[Phase, list[int]] = {p: [0] * len(stages) for p in ("F", "I", "W")}
        self.arrived: dict[Phase, list[list[float]]] = {p: [[] for _ in stages] for p in ("F", "I")}
        self.arrived["F"][0] = [0.0] * count
        self.free, self.memory, self.idle, self.begin = ([0.0] * len(crews) for _ in range(4))
        self.lines: list[list[Action]] = [[] for _ in crews]
        self.given = list(map(_without_weights, given))
        self.awake = [(0.0, device) for device in range(len(crews))]

    def choose(self, device: int, time: float) -> tuple[Action | None, float]:
        """Return what a free device runs now, or when something that it can run arrives."""
        soonest = math.inf
        for phase, mesh in self._wanted(device):
            place = self.done[phase][mesh]
            if place < len(self.arrived[phase][mesh]):
                at = self.arrived[phase][mesh][place]
                if at <= time:
                    return Action(mesh, phase, place), at
                soonest = min(soonest, at)
        pending = [m for m in self.crews[device] if self.done["W"][m] < self.done["I"][m]]
        if pending:
            mesh = max(pending, key=lambda one: self.done["I"][one] - self.done["W"][one])
            if self._is_worth(device, soonest - time, self.stages[mesh].weight):
                return Action(mesh, "W", self.done["W"][mesh]), time
        return None, soonest

    def _is_worth(self, device: int, wait: float, takes: float) -> bool:
        """Whether a device that would wait so long for something else runs a W that takes so long."""
        if wait >= (1 - self.policy.share) * takes:
            return True
        return self.policy.balances and wait < takes and self.idle[device] + wait > max(self.idle)

    def _wanted(self, device: int) -> Iterator[tuple[Phase, int]]:
        """Yield what a device would run if it had arrived, best first: I, then forwards with room."""
        own = self.crews[device]
        begun, returned = (sum(self.done[phase][mesh] for mesh in own) for phase in ("F", "I"))
        if self.given:
            yield from self._given(device, begun + returned)
            return
        is_warm = bool(self.policy.warmup) and self._is_warm(device, begun, returned)
        ahead: list[tuple[Phase, int]] = [
            ("F", mesh)
            for mesh in reversed(own)
            if not is_warm and self.room.fits(device, self.memory[device], mesh)
        ]
        phases: list[tuple[Phase, int]] = [("I", mesh) for mesh in reversed(own)]
        yield from (ahead + phases if self.policy.hurries else phases + ahead)

    def _given(self, device: int, at: int) -> Iterator[tuple[Phase, int]]:
        """Yield what comes at a place of a device's given order, if there is room or none to be made."""
        for mesh, phase, _ in self.given[device][at : at + 1]:
            if (
                phase == "I"
                or self.room.fits(device, self.memory[device], mesh)
                or not self._can_free(self.crews[device])
            ):
                yield phase, mesh

    def _is_warm(self, device: int, begun: int, returned: int) -> bool:
        """Whether a device has begun as many forwards as it may by now."""
        most = self.policy.warmup[device] + (returned if self.policy.paced else 0)
        return begun >= most and (self.policy.paced or not returned)

    def _can_free(self, own: Sequence[int]) -> bool:
        return any(self.done["W"][mesh] < self.done["I"][mesh] for mesh in own)

    def run(self, device: int, action: Action, time: float) -> None:
        """Run an action from a time on, and tell those who wait for it."""
        mesh, phase, _ = action
        end = time + self.stages[mesh].seconds(phase)
        if self.lines[device]:
            self.idle[device] += time - self.free[device]
        else:
            self.begin[device] = time
        self.lines[device].append(action)
        self.done[phase][mesh] += 1
        self.memory[device] += self.room.added(mesh, phase)
        self.free[device] = end
        heapq.heappush(self.awake, (end, device))
        is_last = mesh == len(self.stages) - 1
        if phase == "W" or (phase == "I" and mesh == 0):
            return
        reader = mesh - 1 if phase == "I" else mesh if is_last else mesh + 1
        other = self.home[reader]
        arrives = end + (self.stages[max(mesh, reader)].receive if other != device else 0.0)
        self.arrived["I" if is_last else phase][reader].append(arrives)
        heapq.heappush(self.awake, (arrives, other))
