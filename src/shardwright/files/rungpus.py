"""The cluster that a published run names: accelerators by family and memory, and their links."""

from __future__ import annotations

import re
from dataclasses import replace

from shardwright.core.cluster import Cluster, Device, DeviceKind, Link, Switch
from shardwright.errors import InputError
from shardwright.files.presets import (
    INTER_LATENCY,
    device_kind,
    find_kind,
    kind_names,
    usual_node,
)
from shardwright.files.runs import PublishedRun

USUAL_GPUS_PER_NODE = 8
# Bytes per second and device of the network beside devices that no published node has: one port of 400 or
# 200 Gbit/s each, from memory.
USUAL_PORT = {"H800-SXM": 50e9, "H20-SXM": 50e9, "MI300X": 50e9, "MI325X": 50e9, "GB300-SXM": 50e9,
              "A800-SXM4-80GB": 25e9, "GH200-96GB": 25e9, "MI250X": 25e9}  # fmt: skip
# What people write before a device's name.
VENDORS = re.compile(r"^((nvidia|amd|instinct|tesla|geforce|dgx)[ -]+)+", re.IGNORECASE)
# Memories that differ by more are another product.
SAME_MEMORY = 0.1


def cluster_of_run(run: PublishedRun) -> tuple[Cluster, tuple[str, ...]]:
    """Return the cluster and what had to be assumed of it. Raises InputError for an unknown kind or
    network."""
    kind, near, assumed = _kind(run)
    if run.intra_bw_gbs is not None:
        near = replace(near, bandwidth=run.intra_bw_gbs * 1e9)
    wide = run.gpus_per_node or USUAL_GPUS_PER_NODE
    if run.gpus_per_node is None and run.gpus > 1:
        assumed += (f"{wide} devices per host",)
    hosts = -(-run.gpus // wide)
    if hosts == 1:
        switches = (Switch(name="host"),)
        devices = (Device(kind=0, host=0, link=near),) * run.gpus
    else:
        uplink, note = _uplink(run, kind.name, wide)
        assumed += note
        link = Link(latency=INTER_LATENCY, bandwidth=uplink, source="published")
        names = [Switch(name=f"host{i}", parent=0, link=link) for i in range(hosts)]
        switches = (Switch(name="network", is_host=False), *names)
        devices = tuple(Device(kind=0, host=1 + i // wide, link=near) for i in range(run.gpus))
    name = f"{hosts}x{min(wide, run.gpus)}x{run.gpu}"
    return Cluster(name=name, kinds=(kind,), switches=switches, devices=devices), assumed


def _kind(run: PublishedRun) -> tuple[DeviceKind, Link, tuple[str, ...]]:
    """Return the published kind of the same family whose memory is nearest."""
    gpu = VENDORS.sub("", run.gpu.strip())
    family = re.match(r"[A-Za-z]+[ -]?\d+[A-Za-z]*", gpu)
    wanted = (family[0] if family else gpu).replace(" ", "").replace("-", "").lower()
    kinds = [device_kind(name) for name in _relatives(run, gpu, wanted)]
    written = re.search(r"\b(\d+) ?Gi?B?\b|[- ](\d+)$", gpu, re.IGNORECASE)
    memory = run.gpu_mem_gb or (float(written[1] or written[2]) if written else None)
    if memory is None:
        usual = find_kind(wanted)
        chosen = next((pair for pair in kinds if pair[0].name == usual), kinds[0])
        return *chosen, ()
    kind, link = min(kinds, key=lambda pair: abs(pair[0].memory_bytes / 1e9 - memory))
    if abs(kind.memory_bytes / 1e9 - memory) <= SAME_MEMORY * memory:
        return kind, link, ()
    other = replace(kind, memory_bytes=memory * 1e9)
    return other, link, (f"rates of {kind.name} with {memory:g} GB",)


def _relatives(run: PublishedRun, gpu: str, family: str) -> list[str]:
    """Return the names of the published kinds of a family, on a card where the run's were."""
    names = [name for name in kind_names() if name.lower().split("-")[0] == family]
    names = [n for n in names if ("pcie" in n.lower()) == ("pcie" in run.gpu.lower())] or names
    if names:
        return names
    if name := find_kind(gpu):
        return [name]
    raise InputError(f"no published rates of {run.gpu}")


def _uplink(run: PublishedRun, kind: str, wide: int) -> tuple[float, tuple[str, ...]]:
    """Return the bytes per second of a host's network, and what was assumed of it."""
    if run.inter_bw_gbps_node is not None:
        return run.inter_bw_gbps_node * 1e9 / 8, ()
    node = usual_node(kind)
    if node is None and kind in USUAL_PORT:
        port = USUAL_PORT[kind]
        return port * wide, (f"{port * 8e-9:g} Gbit/s of network per device",)
    if node is None:
        raise InputError(f"no network published, and no usual one known for {run.gpu}")
    uplink = node.uplink * min(wide / node.num_devices, 1.0)
    return uplink, (f"network of {node.name}",)
