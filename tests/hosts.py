"""Several hosts on one machine: network namespaces on a bridge, their links shaped both ways.

Needs root, and `ip` and `tc`. The bucket is small, since a large burst would let small messages
through unshaped; segmentation offload is off so that the shaper sees real packets. Frames are large:
with 1,500 bytes, handling packets held two cores to 0.25 Gbit/s whatever the shaped rate; with 9,000 a
stream gets 0.97 of 1 Gbit/s, but four hosts that sum gradients need 1.75 of two cores for it, and with
32,000, which take as long as the other ones at a third of the rate, 0.45.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator

# Bytes of a frame and of the shaper's bucket, by the rate (Mbit/s) from which on they are so large.
FRAMES = {500.0: (32000, "40kb"), 0.0: (9000, "16kb")}
WORDS = {"kbit": 1e-3, "mbit": 1.0, "gbit": 1e3}


def why_not() -> str:
    """Say why hosts cannot be made here, or nothing."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"{' and '.join(missing)} missing (Debian's iproute2)" if missing else ""


def _frames(rate: str) -> tuple[int, str]:
    mbits = float(rate[:-4]) * WORDS[rate[-4:]]
    return next(sizes for least, sizes in FRAMES.items() if mbits >= least)


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True, timeout=20)


@contextlib.contextmanager
def hosts(count: int, rate: str = "100mbit", prefix: str = "swb") -> Iterator[list[str]]:
    """Make namespaces ``prefix0..`` with addresses 10.84.0.1.., device eth0; remove them after."""
    names = [f"{prefix}{index}" for index in range(count)]
    bridge = f"br-{prefix}"
    frame, bucket = _frames(rate)
    _remove(names, bridge)
    try:
        _run(f"ip link add {bridge} type bridge")
        _run(f"ip link set {bridge} up")
        for index, name in enumerate(names):
            _run(f"ip netns add {name}")
            _run(f"ip link add v{name} type veth peer name eth0 netns {name}")
            _run(f"ip link set v{name} mtu {frame} gso_max_segs 1 master {bridge} up")
            _run(f"ip -n {name} link set eth0 mtu {frame} gso_max_segs 1")
            _run(f"ip -n {name} addr add 10.84.0.{index + 1}/16 dev eth0")
            _run(f"ip -n {name} link set eth0 up")
            _run(f"ip -n {name} link set lo up")
            shape = f"root tbf rate {rate} burst {bucket} latency 100ms"
            _run(f"ip netns exec {name} tc qdisc add dev eth0 {shape}")
            _run(f"tc qdisc add dev v{name} {shape}")
        yield names
    finally:
        _remove(names, bridge)


def _remove(names: list[str], bridge: str) -> None:
    for name in names:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False, timeout=20)
    subprocess.run(["ip", "link", "del", bridge], capture_output=True, check=False, timeout=20)
