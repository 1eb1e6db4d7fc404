"""Recipes for switches, set in a namespace and judged by the kernel's own counters."""

import os
import re
import subprocess
import sys

import pytest

from shardwright.errors import InputError
from shardwright.lossy.switches import Recipe, recipe
from tests.hosts import hosts, why_not

RATE, EACH = "10mbit", 200
SWITCH = (sys.executable, "-m", "shardwright.lossy")
# Sends packets of 1400 bytes to 10.84.0.2, as many with each IP byte; the other end counts them.
SEND = f"""
import socket, sys
one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
one.setsockopt(socket.SOL_SOCKET, 32, 2**22)  # SO_SNDBUFFORCE: the whole burst at once
for tos in map(int, sys.argv[1:]):
    one.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, tos)
    for _ in range({EACH}):
        one.sendto(bytes([tos]) * 1400, ("10.84.0.2", 5000))
"""
LISTEN = """
import socket, sys
one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
one.bind(("10.84.0.2", 5000))
one.settimeout(20)
print("ready", flush=True)
came = []
while not came or len(came) < int(sys.argv[1]):
    try:
        came.append(one.recv(2000)[0])
    except TimeoutError:
        break
    one.settimeout(1)
print(*came)
"""


def test_commands_are_printed_with_what_takes_them_back_and_odd_words_are_refused():
    done = subprocess.run(
        [*SWITCH, "bands", "--device", "eth0", "--rate", "10gbit"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert lines[0].startswith("tc qdisc add dev eth0 root")
    assert lines[lines.index("# undo:") + 1 :][:2] == [
        "nft delete table netdev shardwright", lines[0].replace("add", "del"),
    ]  # fmt: skip
    for words, says in (
        (("eth0; reboot", "1gbit"), "a device has a name"), (("eth0", "fast"), "a rate is such as"),
        (("eth0", "0bit"), "a rate is such as"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=says):
            recipe("leaves", *words)
    with pytest.raises(InputError, match="choose one"):
        recipe("red", "eth0", "1gbit")


def test_a_command_that_is_not_installed_is_named_and_what_was_set_before_it_is_taken_back(
    tmp_path,
):
    done, undone = tmp_path / "done", tmp_path / "undone"
    some = Recipe((f"touch {done}", "no-such-nft add"), ("no-such-nft del", f"touch {undone}"), "")
    with pytest.raises(InputError, match=r"'no-such-nft add' said 'no-such-nft is not installed'"):
        some.apply()
    assert done.exists()
    assert undone.exists()


def test_what_cannot_be_taken_back_is_told():
    done = subprocess.run(
        [*SWITCH, "leaves", "--device", "no-such", "--rate", "1gbit", "--undo"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert not done.stdout
    assert "root, and the recipe and device that were applied" in done.stderr


def inside(host, *command):
    return ["ip", "netns", "exec", host, *command]


def counted(host):
    """Packets sent and dropped by class."""
    text = subprocess.run(
        inside(host, "tc", "-s", "class", "show", "dev", "eth0"),
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    found = re.findall(
        r"class htb (1:\w+) .*?Sent \d+ bytes (\d+) pkt \(dropped (\d+)", text, re.DOTALL
    )
    return {name: (int(sent), int(dropped)) for name, sent, dropped in found}


def burst(names, name, *tos):
    """Apply a recipe at the first host, send a burst with each IP byte; return what came, and counters."""
    switch = inside(names[0], *SWITCH, name, "--device", "eth0", "--rate", RATE)
    subprocess.run([*switch, "--apply"], capture_output=True, check=True)
    count = str(EACH * len(tos))
    listener = subprocess.Popen(
        inside(names[1], sys.executable, "-c", LISTEN, count), stdout=subprocess.PIPE, text=True
    )
    try:
        assert listener.stdout.readline() == "ready\n"
        subprocess.run(inside(names[0], sys.executable, "-c", SEND, *map(str, tos)), check=True)
        came = [int(one) for one in listener.communicate(timeout=60)[0].split()]
    finally:
        listener.kill()
        listener.communicate()
    counts = counted(names[0])
    subprocess.run([*switch, "--undo"], capture_output=True, check=True)
    assert counted(names[0]) == {}
    return came, counts


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "hosts can be made")
def test_the_kernel_drops_only_what_may_be_dropped_and_sends_the_urgent_first():
    # The patient are of the last class but one: the last has what else a host sends, such as ARP.
    protected, droppable, urgent, patient = 0x02, 0x00, 0xE2, 0x22
    with hosts(2, rate="1gbit", prefix=f"sws{os.getpid() % 10000}") as names:
        first = inside(names[0], "tc", "qdisc", "del", "dev", "eth0", "root")
        other = inside(names[0], *SWITCH, "selective", "--device", "eth0", "--rate", RATE, "--undo")
        assert subprocess.run(other, check=False, capture_output=True).returncode == 2
        subprocess.run(first, check=True, capture_output=True)  # that of somebody else, still there
        came, counts = burst(names, "selective", protected, droppable)
        assert came.count(protected) == EACH
        assert counts["1:1"][1] == 0
        assert counts["1:2"][1] == EACH - came.count(droppable) > 0
        came, counts = burst(names, "leaves", patient, urgent)
        assert counts["1:1"][0] == counts["1:7"][0] == EACH
        # Sent last, all but the first few before the patient.
        assert came.index(urgent) < EACH / 2
        last_urgent = len(came) - 1 - came[::-1].index(urgent)
        assert came[:last_urgent].count(patient) < EACH / 2
