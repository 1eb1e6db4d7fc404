"""Orders on a V: every device has two meshes, the first device the first and the last.

So the last mesh's gradients come back to the device that fed the first, and what is kept is alike on
all devices. Sources: Qi et al., "Pipeline Parallelism with Controllable Memory", 2024 (V-Half,
V-Min, and the block that repeats); ZB-V is in the appendix of their "Zero Bubble Pipeline
Parallelism", ICLR 2024.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from shardwright.planner.schedule.pipeline import Action, Crews, Line
from shardwright.planner.schedule.play import with_weights_late

# In units of an action: from a device's forward to the next one's, down the V and up again. Their
# sum, of the six units of a microbatch, is the share of 1F1B's activations that stays.
DELAYS = {"v-half": (2, 1), "v-min": (1, 1)}


def folded(num_stages: int) -> Crews:
    """Return the meshes of each device of a V. Raises ValueError for an odd number of meshes."""
    if num_stages % 2:
        raise ValueError(
            f"a V has two meshes on every device, not {num_stages} in all; give an even number"
        )
    return tuple((k, num_stages - 1 - k) for k in range(num_stages // 2))


def folded_order(schedule: str, num_stages: int, num_microbatches: int) -> tuple[Line, ...]:
    """Return the order of ``zb-v``, ``v-half`` or ``v-min``.

    W fills what would idle if F, I and W took equally long, within the memory that the order of F and I
    with its own W takes. ZB-V without any idle time there is taken as it stands.
    """
    crews = folded(num_stages)
    if schedule == "zb-v":
        lines = [_zero_bubble(own, len(crews), num_microbatches) for own in crews]
        if num_microbatches >= num_stages - 1:
            return tuple(lines)
    else:
        lines = _blocks(crews, num_microbatches, DELAYS[schedule])
    return with_weights_late(lines, num_stages, num_microbatches, crews)


def _zero_bubble(own: Sequence[int], devices: int, count: int) -> Line:
    """Return what a device of ZB-V runs.

    F of its first mesh until its second one's first F arrives, both in turn, F I W of the second
    until the first one's first I, then F I W of the first and the second in turn, and what is left: I
    of both, then with W.
    """
    down, up = own
    place = down
    done = dict.fromkeys(product(own, "FIW"), 0)
    line: list[Action] = []

    def run(mesh: int, phases: str) -> None:
        for phase in phases:
            number = done[mesh, phase]
            ready = {"F": count, "I": done[mesh, "F"], "W": done[mesh, "I"]}[phase]
            if number < ready:
                line.append(Action(mesh, phase, number))  # type: ignore[arg-type]  # a phase
                done[mesh, phase] += 1

    begin = [(down, "F" * (2 * (devices - place) - 1))]
    begin += [(up, "F"), (down, "F")] * place + [(up, "FIW")] * (devices - place)
    for mesh, phases in begin:
        run(mesh, phases)
    while done[up, "F"] < count or done[down, "F"] < count:
        run(down, "FIW")
        run(up, "FIW")
    for mesh in [down, up] * place:
        run(mesh, "I")
    while done[down, "I"] < count or done[up, "I"] < count:
        run(down, "IW")
        run(up, "I")
    run(up, "W" * count)
    run(down, "W" * count)
    return tuple(line)


def _blocks(crews: Crews, count: int, delays: tuple[int, int]) -> list[Line]:
    """Return the block of one microbatch, repeated every six units.

    F goes down with the first delay and up with the second, I likewise. What lies between the four
    legs is the least with which no two of a device's actions fall into one unit of the six; two units
    are left, for W. Devices keep the order of the units and start as soon as they can.
    """
    lines: list[Line] = []
    for (down, up), four in zip(crews, _legs(len(crews), delays), strict=True):
        timed = [(unit, mesh, phase)
                 for unit, mesh, phase in zip(four, (down, up, up, down), "FFII", strict=True)]  # fmt: skip
        free = set(range(6)) - {unit % 6 for unit in four}
        last = min(free, key=lambda unit: (unit - four[3]) % 6)
        other = (free - {last}).pop()
        timed.append((four[3] + (last - four[3]) % 6, down, "W"))
        timed.append((four[2] + (other - four[2]) % 6, up, "W"))
        placed = sorted(
            (unit + 6 * m, mesh, phase, m) for unit, mesh, phase in timed for m in range(count)
        )
        lines.append(tuple(Action(mesh, phase, m) for _, mesh, phase, m in placed))  # type: ignore[arg-type]  # a phase
    return lines


def _legs(devices: int, delays: tuple[int, int]) -> list[tuple[int, int, int, int]]:
    """Return for each device the units of F down, F up, I down the V again, and I up."""
    down, up = delays
    for turn, loss, back in sorted(product(range(1, 7), repeat=3), key=sum):
        up_at = (devices - 1) * down + turn
        in_at = up_at + (devices - 1) * up + loss
        out_at = in_at + (devices - 1) * down + back
        units = [
            (k * down, up_at + (devices - 1 - k) * up,
             in_at + k * down, out_at + (devices - 1 - k) * up)
            for k in range(devices)
        ]  # fmt: skip
        if all(len({unit % 6 for unit in four}) == 4 for four in units):
            return units
    raise AssertionError("the delays of the table leave room on any number of devices")
