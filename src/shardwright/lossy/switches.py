"""What Linux as a switch must be told, so that it heeds the labels of gradient packets.

A recipe is commands, and the commands that take them back. Each replaces the root queue of one
device: that which leads towards the receivers.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

from shardwright.errors import InputError
from shardwright.lossy.labels import PRIORITIES

UDP = 17
QUEUE_BYTES, DROPPABLE_BYTES = 400_000, 30_000  # of a leaf; at 100 Mbit/s 32 ms and 2.4 ms


@dataclass(frozen=True, slots=True)
class Recipe:
    """Commands in order, those that undo them, and the one that shows what the kernel counted."""

    setup: tuple[str, ...]
    undo: tuple[str, ...]
    counters: str

    def apply(self) -> None:
        """Run the commands; where one fails, undo those before and raise InputError with its words."""
        for place, command in enumerate(self.setup):
            if said := _failed(command):
                if place:  # what the first found there is somebody else's
                    with contextlib.suppress(InputError):  # not all of it was set
                        self.revert()
                raise InputError(
                    f"a switch must take every command, but {command!r} said {said!r}; it needs "
                    "root, and a kernel with what it names"
                )

    def revert(self) -> None:
        """Take back what the commands set, as far as it is there; raises InputError where something is not."""
        said = [
            f"{command!r} said {words!r}" for command in self.undo if (words := _failed(command))
        ]
        if said:
            raise InputError(
                f"what is taken back must be there, but {', '.join(said)}; it needs root, and the recipe and "
                "device that were applied"
            )


def _failed(command: str) -> str:
    """Run a command; return why it failed, nothing where it did not."""
    words = shlex.split(command)
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return f"{words[0]} is not installed"
    return (done.stderr.strip() or f"exit code {done.returncode}") if done.returncode else ""


def leaves(device: str, rate: str) -> Recipe:
    """Strict priorities: eight leaves of HTB, by DSCP. Other traffic shares the last."""
    setup = list(_root(device, rate, default=PRIORITIES))
    for priority in range(PRIORITIES):
        leaf, tos = priority + 1, (PRIORITIES - 1 - priority) << 5
        setup += _leaf(device, leaf, f"rate 64kbit ceil {rate} prio {priority}", QUEUE_BYTES)
        setup.append(
            f"tc filter add dev {device} parent 1: protocol ip prio 1 u32 match ip dsfield {tos:#04x} 0xfc flowid 1:{leaf}"
        )
    return Recipe(tuple(setup), (_undone(setup[0]),), f"tc -s class show dev {device}")


def selective(device: str, rate: str) -> Recipe:
    """Selective drops: two leaves of HTB that share the line, a short one for UDP packets that may be
    dropped, a long one for all others."""
    match = f"match ip protocol {UDP} 0xff match ip dsfield 0x00 0x03"
    setup = (
        *_root(device, rate, default=1),
        *_leaf(device, 1, f"rate 64kbit ceil {rate} prio 0", QUEUE_BYTES),
        *_leaf(device, 2, f"rate 64kbit ceil {rate} prio 0", DROPPABLE_BYTES),
        f"tc filter add dev {device} parent 1: protocol ip prio 1 u32 {match} flowid 1:2",
    )
    return Recipe(setup, (_undone(setup[0]),), f"tc -s class show dev {device}")


def bands(device: str, rate: str) -> Recipe:
    """Strict priorities in three bands of pfifo_fast, which nftables chooses by DSCP."""
    chain = f"nft add chain netdev shardwright egress '{{ type filter hook egress device {device} priority 0; }}'"
    priorities = {7: 6, 6: 6, 5: 0, 4: 0, 3: 0, 2: 2, 1: 2, 0: 2}
    setup = (
        f"tc qdisc add dev {device} root handle 1: tbf rate {rate} burst 16kb latency 100ms",
        f"tc qdisc add dev {device} parent 1:1 handle 10: pfifo_fast",
        "nft add table netdev shardwright",
        chain,
        *(
            f"nft add rule netdev shardwright egress ip dscp cs{selector} meta priority set 0:{value}"
            for selector, value in priorities.items()
        ),
    )
    undo = ("nft delete table netdev shardwright", _undone(setup[0]))
    return Recipe(setup, undo, f"tc -s qdisc show dev {device}")


RECIPES: dict[str, Callable[[str, str], Recipe]] = {
    "leaves": leaves,
    "selective": selective,
    "bands": bands,
}


def recipe(name: str, device: str, rate: str) -> Recipe:
    """Return a recipe for a device and its line rate in tc's words; raises InputError."""
    if name not in RECIPES:
        raise InputError(f"recipes are {', '.join(RECIPES)}, not {name!r:.40}; choose one")
    if not re.fullmatch(r"[\w.:@-]{1,15}", device):
        raise InputError(
            f"a device has a name as `ip link` shows it, not {device!r:.40}; name the one to shape"
        )
    if not re.fullmatch(r"(?=.*[1-9])\d+(\.\d+)?[kmg]?bit", rate):
        raise InputError(f"a rate is such as 100mbit or 10gbit, not {rate!r:.40}; give the line's")
    return RECIPES[name](device, rate)


def _root(device: str, rate: str, *, default: int) -> tuple[str, ...]:
    return (
        f"tc qdisc add dev {device} root handle 1: htb default {default}",
        f"tc class add dev {device} parent 1: classid 1:100 htb rate {rate} ceil {rate} burst 15k",
    )


def _leaf(device: str, number: int, rates: str, limit: int) -> tuple[str, ...]:
    return (
        f"tc class add dev {device} parent 1:100 classid 1:{number} htb {rates} quantum 3000 burst 15k",
        f"tc qdisc add dev {device} parent 1:{number} handle {number + 10}: bfifo limit {limit}",
    )


def _undone(command: str) -> str:
    """Return what takes a root queue back: named whole, since the kernel then refuses to take another one."""
    return command.replace("add", "del", 1)
