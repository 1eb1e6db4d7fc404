"""Incast: senders into one shaped port that loses packets; gloo over TCP beside messages over UDP.

``python benchmarks/lossy.py --senders 8 --drop 0.02`` (root; Linux with iproute2). Each sender is a host (a
network namespace) of its own, all send to host 0 at one moment, and each message's completion is
timed there, the two transports in turns. Packets are lost in the kernel, at random, by a classifier
at the port's way out (tc, classic BPF): the same for TCP and UDP.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a script

from shardwright.lossy import Tolerance, Transport, UdpRank, join
from shardwright.lossy.labels import labelled
from shardwright.lossy.messages import uniform
from shardwright.lossy.settings import lost_at_most
from shardwright.runtime.cores import wait_when_woken
from tests.hosts import hosts, why_not

MTU, FRAME_BYTES = 1500, 14
PORT_SHARE = 0.93  # of the shaped rate: what is left after headers, ENDs, and other traffic


def drop_at(device: str, share: float) -> None:
    """Lose packets on their way out of a device: load a random number, shoot or pass."""
    program = f"4,32 0 0 4294963256,53 0 1 {int((1 - share) * 2**32)},6 0 0 2,6 0 0 0"
    for command in (
        ["tc", "qdisc", "add", "dev", device, "clsact"],
        ["tc", "filter", "add", "dev", device, "egress", "bpf", "da", "bytecode", program],
    ):
        subprocess.run(command, check=True, capture_output=True)


def enter(namespace: str) -> None:
    with Path(f"/var/run/netns/{namespace}").open() as file:
        if ctypes.CDLL(None).setns(file.fileno(), 0) != 0:
            raise OSError(f"cannot enter {namespace}")
    os.environ |= {"GLOO_SOCKET_IFNAME": "eth0", "MASTER_ADDR": "10.84.0.1", "OMP_NUM_THREADS": "1"}


def incast_tcp(rank: int, data: torch.Tensor, barrier, tag: int) -> list[float]:
    """Return when each sender's message was complete; what a sender returns is empty."""
    size = dist.get_world_size()
    if rank:
        barrier.wait()
        dist.send(data, 0, tag=tag)
        return []
    memory = [torch.empty_like(data) for _ in range(size - 1)]
    works = [dist.irecv(one, source + 1, tag=tag) for source, one in enumerate(memory)]
    return timed([lambda work=work: work.wait() for work in works], barrier)


def incast_udp(udp: UdpRank, data: np.ndarray, barrier, number: int, tolerance: Tolerance):
    shape = udp.endpoint.shape(len(data), data.itemsize)
    allowed = lost_at_most(tolerance.push, shape.packets)
    if udp.rank:
        barrier.wait()
        labels = labelled(data, shape, allowed, tolerance, 0)
        message = udp.post(0, number, data, uniform(shape, allowed), labels)
        udp.wait([message])
        return [], message.num_resent
    messages = [
        udp.expect(one, number, data, uniform(shape, allowed)) for one in range(1, udp.size)
    ]
    seconds = timed([lambda one=one: udp.wait([one]) for one in messages], barrier)
    return seconds, sum(one.num_missing for one in messages)


def timed(waits, barrier) -> list[float]:
    seconds = [0.0] * len(waits)

    def wait(place):
        waits[place]()
        seconds[place] = time.monotonic() - start

    start = time.monotonic()
    threads = [threading.Thread(target=wait, args=(place,)) for place in range(len(waits))]
    for thread in threads:
        thread.start()
    barrier.wait()
    start = time.monotonic()
    for thread in threads:
        thread.join()
    return seconds


def rank_main(rank: int, name: str, options, barrier, results) -> None:
    enter(name)
    torch.set_num_threads(1)
    wait_when_woken()  # as where ranks train
    size = options.senders + 1
    dist.init_process_group("gloo", rank=rank, world_size=size, init_method="tcp://10.84.0.1:29511")
    bytes_per_second = line_rate(options)
    tolerance = Tolerance(push=options.bound, important=options.important)
    transport = Transport(rate=bytes_per_second * PORT_SHARE, timeout=60)
    udp = join(dist.group.WORLD, transport)
    data = torch.randn(options.kilobytes * 256, generator=torch.Generator().manual_seed(rank))
    found = {"tcp": [], "udp": []}
    missing = resent = 0
    for turn in range(options.rounds + 1):
        for kind in ("tcp", "udp") if turn % 2 else ("udp", "tcp"):
            barrier.wait()
            if kind == "tcp":
                seconds = incast_tcp(rank, data, barrier, turn)
            else:
                seconds, count = incast_udp(udp, data.numpy(), barrier, turn, tolerance)
                missing, resent = missing + (not rank) * count, resent + bool(rank) * count
            if turn:  # the first opens connections and compiles
                found[kind] += seconds
    barrier.wait()
    udp.close()
    shape = udp.endpoint.shape(len(data), 4)
    results.put((rank, found, missing, resent, shape.packets))
    dist.destroy_process_group()


def line_rate(options) -> float:
    """Return the bytes a second of the shaped port."""
    return float(re.sub(r"\D", "", options.rate)) * 1e6 / 8


def line_seconds(options, packets: int) -> float:
    """Return what the port takes for as much of all messages as must arrive: one in so many messages as there are
    senders is complete no sooner, by any transport, so the 99th percentile of more than a hundred is no less."""
    needed = packets - lost_at_most(options.bound, packets)
    return options.senders * needed * (MTU + FRAME_BYTES) / line_rate(options)


def report(options, said) -> None:
    found = next(one[1] for one in said if one[0] == 0)
    missing = sum(one[2] for one in said)
    resent = sum(one[3] for one in said)
    packets = said[0][4] * options.senders * (options.rounds + 1)
    print(
        f"{options.senders} senders of {options.kilobytes} KiB ({said[0][4]} packets) into {options.rate}, "
        f"{options.drop:.1%} dropped, bound {options.bound:.1%}, {options.rounds} rounds in turns"
    )
    print(f"{'':6}{'mean':>10}{'median':>10}{'p99':>10}{'longest':>10}  milliseconds")
    for kind, name in (("tcp", "gloo"), ("udp", "lossy")):
        times = np.array(found[kind]) * 1e3
        row = (times.mean(), np.median(times), np.quantile(times, 0.99), times.max())
        print(f"{name:6}" + "".join(f"{one:10.1f}" for one in row))
    ratios = [np.quantile(found["tcp"], 0.99) / np.quantile(found["udp"], 0.99)]
    ratios.append(np.mean(found["tcp"]) / np.mean(found["udp"]))
    print(
        f"p99 {ratios[0]:.2f}x, mean {ratios[1]:.2f}x; of {packets} packets {missing} accepted as lost, "
        f"{resent} sent again"
    )
    least = line_seconds(options, said[0][4])
    print(
        f"the line takes {least * 1e3:.1f} ms for what must arrive of all messages, so p99 beside this gloo is at most "
        f"{np.quantile(found['tcp'], 0.99) / least:.2f}x"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--senders", type=int, default=8)
    parser.add_argument("--kilobytes", type=int, default=256)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--drop", type=float, default=0.02)
    parser.add_argument("--bound", type=float, default=0.05)
    parser.add_argument("--important", type=float, default=0.05)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    if why_not():
        raise SystemExit(why_not())
    forking = multiprocessing.get_context("fork")
    barrier, results = forking.Barrier(options.senders + 1), forking.Queue()
    with hosts(options.senders + 1, rate=options.rate, prefix=f"sl{os.getpid() % 10000}x") as names:
        for name in names:
            subprocess.run(["ip", "-n", name, "link", "set", "eth0", "mtu", str(MTU)], check=True)
        drop_at(f"v{names[0]}", options.drop)
        ranks = [
            forking.Process(
                target=rank_main, args=(rank, name, options, barrier, results), daemon=True
            )
            for rank, name in enumerate(names)
        ]
        for rank in ranks:
            rank.start()
        try:
            said = sorted((results.get(timeout=280) for _ in ranks), key=lambda one: one[0])
        finally:
            for rank in ranks:
                rank.join(timeout=2)
                rank.kill()
        report(options, said)
        counted = subprocess.run(
            ["tc", "-s", "qdisc", "show", "dev", f"v{names[0]}"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        print(
            "the port:", re.search(r"tbf.*?Sent.*?\n", counted, re.DOTALL).group().replace("\n", "")
        )


if __name__ == "__main__":
    main()
