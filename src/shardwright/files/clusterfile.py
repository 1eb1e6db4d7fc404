"""The border where clusters are read and written: TOML with units, presets, and ``8x8xH100``.

The file describes facts. Whatever is wrong with one ends in a single InputError which names the
file, the key, the value and what is accepted. ``local`` is not read here: detecting a machine needs
the runtime.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shardwright.core.cluster import Cluster, Device, DeviceKind, Link, Switch
from shardwright.core.graph import DTYPE_BYTES
from shardwright.errors import InputError
from shardwright.files.clusterschema import (
    MANUAL,
    MAX_DEVICES,
    ClusterTable,
    DeviceTable,
    HostTable,
    KindTable,
)
from shardwright.files.clustertemplate import TEMPLATE
from shardwright.files.complaints import explain
from shardwright.files.limits import parse_toml, read_text
from shardwright.files.presets import (
    INTER_LATENCY,
    INTRA_LATENCY,
    device_kind,
    find_kind,
    find_node,
    kind_names,
    market_price,
    node_names,
    suggest,
    usual_node,
)
from shardwright.files.units import write_quantity

MAX_FILE_BYTES = 2**20


def load_cluster(path: str | Path) -> Cluster:
    """Read a cluster file. Raises InputError."""
    text = read_text(path, MAX_FILE_BYTES, "a cluster file", "write equal hosts once, with a count")
    return read_cluster(text, str(path))


def parse_cluster(text: str) -> Cluster:
    """Return the cluster that a command line names: a file, ``8x8xH100``, or ``8x p5.48xlarge``."""
    text = text.strip()
    if text.endswith(".toml") or _is_file(text):
        return load_cluster(text)
    if text == "local":
        raise InputError(
            "cluster 'local' is this machine and must be detected; it is not a file: name one"
        )
    cluster = _node_shorthand(text) or _kind_shorthand(text)
    if cluster is None:
        raise InputError(
            f"cluster {text[:80]!r} is neither a TOML file, nor HOSTSxDEVICESxKIND (8x8xH100), nor "
            f"a preset (8x AWS p5.48xlarge){suggest(text[:80], (*node_names(), *kind_names()))}"
        )
    return cluster


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # too long, or a NUL: no file can have this name
        return False


def read_cluster(text: str, where: str = "cluster") -> Cluster:
    """Build a cluster from TOML. ``where`` begins every complaint."""
    try:
        raw = parse_toml(text)
    except ValueError as error:
        raise InputError(
            f"{where}: {error}; correct it there, or begin with `shardwright init`"
        ) from None
    try:
        table = ClusterTable.model_validate(raw)
    except ValidationError as error:
        raise InputError(f"{where}: {explain(error, ClusterTable, MANUAL)}") from None
    try:
        return _Builder(table).build()
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


class _Builder:
    """Grows a Cluster from a checked file."""

    def __init__(self, table: ClusterTable) -> None:
        self.table = table
        self.kinds: list[DeviceKind] = []
        self.links: dict[str, Link] = {}
        self.switches: list[Switch] = []
        self.names: dict[str, int] = {}
        self.devices: list[Device] = []
        self.notes: list[str] = []

    def build(self) -> Cluster:
        for name, kind in self.table.kind.items():
            self._declare(name, kind)
        total = sum(host.count for host in self.table.host)
        if total > MAX_DEVICES:
            raise InputError(f"host: at most {MAX_DEVICES} hosts, not {total}; lower their count")
        if total > 1 or self.table.switch:
            self._add(Switch(name="network", is_host=False), "switch")
        for index, switch in enumerate(self.table.switch):
            link = Link(latency=switch.latency, bandwidth=switch.uplink, source=switch.source)
            parent = self._parent(switch.parent, f"switch[{index}].parent")
            self._add(
                Switch(name=switch.name, parent=parent, link=link, is_host=False),
                f"switch[{index}]",
            )
        for index, host in enumerate(self.table.host):
            self._hosts(host, f"host[{index}]")
        self._forget_unused()
        return Cluster(
            name=self.table.name,
            kinds=tuple(self.kinds),
            switches=tuple(self.switches),
            devices=tuple(self.devices),
            overlap_slowdown=self.table.overlap_slowdown,
            software=self.table.software,
            input_rate=self.table.input_rate,
            rank_input_rate=self.table.rank_input_rate,
            host_input_rate=self.table.host_input_rate,
            host_fetch_rate=self.table.host_fetch_rate,
            rank_batch_seconds=self.table.rank_batch_time,
            host_cores=self.table.host_cores,
            copy_bandwidth=self.table.copy_bandwidth or 0.0,
            notes=(*self.table.notes, *dict.fromkeys(self.notes)),
        )

    def _forget_unused(self) -> None:
        """Leave out kinds that no device is of: a CPU among them would make a cluster of GPUs one of CPUs."""
        used = sorted({device.kind for device in self.devices})
        if len(used) == len(self.kinds):
            return
        self.kinds = [self.kinds[kind] for kind in used]
        renumbered = {
            device: replace(device, kind=used.index(device.kind)) for device in set(self.devices)
        }
        self.devices = [renumbered[device] for device in self.devices]

    def _add(self, switch: Switch, where: str) -> int:
        if switch.name in self.names:
            raise InputError(
                f"{where}.name: names must differ, but {switch.name!r} is there twice; rename one"
            )
        self.names[switch.name] = len(self.switches)
        self.switches.append(switch)
        return len(self.switches) - 1

    def _parent(self, name: str | None, where: str) -> int:
        if name is None:
            return 0
        place = self.names.get(name)
        if place is None or self.switches[place].is_host:
            known = tuple(s.name for s in self.switches if not s.is_host)
            hint = suggest(name, known) if known else "; describe it in a [[switch]] table"
            raise InputError(f"{where}: there is no switch {name!r} above{hint}")
        return place

    def _declare(self, name: str, kind: KindTable) -> None:
        for dtype in kind.peak:
            if dtype not in (*DTYPE_BYTES, "float8"):
                known = ("float64", "float32", "bfloat16", "float16", "float8")
                raise InputError(
                    f"kind.{name}.peak: unknown dtype {dtype!r}{suggest(dtype, known)}"
                )
        self.kinds.append(
            DeviceKind(
                name=name,
                peak_flops=tuple(kind.peak.items()),
                memory_bytes=kind.memory,
                memory_bandwidth=kind.memory_bandwidth,
                backend=kind.backend,
                launch_seconds=kind.launch,
                source=kind.source,
            )
        )

    def _kind(self, name: str, where: str) -> int:
        for index, kind in enumerate(self.kinds):
            if kind.name == name:
                return index
        full = find_kind(name)
        if full is None:
            known = (*self.table.kind, *kind_names())
            raise InputError(f"{where}: there is no device kind {name!r}{suggest(name, known)}")
        if any(kind.name == full for kind in self.kinds):
            return self._kind(full, where)
        kind, link = device_kind(full)
        self.kinds.append(kind)
        self.links[full] = link
        return len(self.kinds) - 1

    def _hosts(self, host: HostTable, where: str) -> None:
        preset = find_node(host.preset) if host.preset is not None else None
        if host.preset is not None and preset is None:
            raise InputError(
                f"{where}.preset: there is no host preset {host.preset!r}"
                f"{suggest(host.preset, node_names())}"
            )
        if preset is not None:
            self.notes.append(preset.note)
            host = host.model_copy(
                update={
                    "kind": host.kind or (None if host.device else preset.kind),
                    "devices": host.devices or (None if host.device else preset.num_devices),
                    "uplink": preset.uplink if host.uplink is None else host.uplink,
                    "price": preset.price if host.price is None else host.price,
                }
            )
        groups = [self._member(group, where) for group in self._groups(host, where)]
        parent, link = self._uplink(host, where)
        price = host.price or 0.0
        for copy in range(host.count):
            name = host.name if host.count == 1 else f"{host.name}{copy}"
            place = Switch(
                name=name, parent=parent, link=link, address=host.address, dollars_per_second=price
            )
            index = self._add(place, where)
            for kind, own, count in groups:
                self._fill(Device(kind=kind, host=index, link=own), count, where)

    def _groups(self, host: HostTable, where: str) -> tuple[DeviceTable, ...]:
        if host.device and (host.kind or host.devices):
            raise InputError(
                f"{where}: kind and devices, and device tables, say the same; leave one of them out"
            )
        if host.device:
            return host.device
        if host.kind is None or host.devices is None:
            missing = "kind" if host.kind is None else "devices"
            raise InputError(
                f"{where}.{missing}: a host needs kind and devices, device tables, or a preset; add "
                f"{missing}"
            )
        return (
            DeviceTable.model_construct(
                kind=host.kind, count=host.devices, link=host.link,
                link_latency=host.link_latency, link_source=host.link_source,
            ),
        )  # fmt: skip

    def _uplink(self, host: HostTable, where: str) -> tuple[int, Link | None]:
        if not self.switches or self.switches[0].is_host:
            return -1, None
        if host.uplink is None:
            raise InputError(
                f"{where}.uplink: with several hosts each needs one; add uplink = '400 Gbit/s'"
            )
        latency = INTER_LATENCY if host.uplink_latency is None else host.uplink_latency
        link = Link(latency=latency, bandwidth=host.uplink, source=host.uplink_source)
        return self._parent(host.switch, f"{where}.switch"), link

    def _member(self, group: DeviceTable, where: str) -> tuple[int, Link, int]:
        """Return the kind of a group's devices, their link, and how many there are."""
        kind = self._kind(group.kind, f"{where}.kind")
        usual = self.links.get(self.kinds[kind].name)
        if group.link is None and usual is None:
            raise InputError(
                f"{where}.link: {group.kind!r} is no preset, so its link must be given; add link = "
                "'450 GB/s'"
            )
        bandwidth = usual.bandwidth if group.link is None and usual else group.link
        latency = INTRA_LATENCY if group.link_latency is None else group.link_latency
        link = Link(latency=latency, bandwidth=bandwidth or 0.0, source=group.link_source)
        return kind, link, group.count

    def _fill(self, device: Device, count: int, where: str) -> None:
        if len(self.devices) + count > MAX_DEVICES:
            raise InputError(
                f"{where}.devices: a cluster has at most {MAX_DEVICES} devices, and this has "
                f"{len(self.devices) + count} or more; lower counts"
            )
        self.devices += [device] * count


def _kind_shorthand(text: str) -> Cluster | None:
    match = re.fullmatch(r"(?:(\d{1,9})\s*x\s*)?(\d{1,9})\s*x\s*([A-Za-z][\w .-]*)", text)
    if match is None:
        return None
    hosts, devices, name = int(match[1] or 1), int(match[2]), match[3]
    if hosts < 1 or devices < 1 or hosts * devices > MAX_DEVICES:
        raise InputError(
            f"cluster {text!r}: needs 1 to {MAX_DEVICES} devices, not {hosts * devices}; name "
            "fewer, such as 8x8xH100"
        )
    full = device_kind(name)[0].name
    dollars, note = market_price(full)
    notes = [note]
    host: dict[str, Any] = {
        "count": hosts,
        "kind": full,
        "devices": devices,
        "price": f"{dollars * devices!r} USD/s",
    }
    if hosts > 1:
        node = usual_node(full)
        if node is None:
            raise InputError(
                f"cluster {text!r}: no published host holds {full}, so the network is "
                "unknown; write a cluster file (shardwright init) with its uplink"
            )
        share = node.uplink * min(devices / node.num_devices, 1.0)
        host["uplink"] = f"{share!r} B/s"
        notes.append(
            f"network between hosts assumed as in {node.name}, {share * 8e-9:g} Gbit/s per host"
        )
    return _from_tables({"name": text, "notes": notes, "host": [host]})


def _node_shorthand(text: str) -> Cluster | None:
    before = re.fullmatch(r"(\d{1,9})\s*x\s*(.+)", text)
    after = re.fullmatch(r"(.+?)\s*x\s*(\d{1,9})", text)
    options = [(1, text)]
    options += [(int(before[1]), before[2])] if before else []
    options += [(int(after[2]), after[1])] if after else []
    for count, name in options:
        node = None if find_kind(name) else find_node(name)
        if node is not None:
            if count < 1 or count * node.num_devices > MAX_DEVICES:
                raise InputError(
                    f"cluster {text[:80]!r}: needs 1 to {MAX_DEVICES} devices, not "
                    f"{count * node.num_devices}; name another number of hosts"
                )
            return _from_tables({"name": text, "host": [{"preset": node.name, "count": count}]})
    return None


def _from_tables(tables: dict[str, Any]) -> Cluster:
    return _Builder(ClusterTable.model_validate(tables)).build()


def write_cluster(cluster: Cluster) -> str:
    """Write a cluster as TOML which reads back as the equal cluster."""
    lines = [f"name = {_text(cluster.name)}"]
    if cluster.overlap_slowdown != 1.0:
        lines.append(f"overlap_slowdown = {float(cluster.overlap_slowdown)!r}")
    if cluster.software != "eager":
        lines.append(f"software = {_text(cluster.software)}")
    rates = ("input_rate", "rank_input_rate", "host_input_rate", "host_fetch_rate", "host_cores")
    for name in rates:
        if rate := getattr(cluster, name):
            lines.append(f"{name} = {float(rate)!r}")
    if cluster.rank_batch_seconds:
        batch = write_quantity(cluster.rank_batch_seconds, "seconds")
        lines.append(f"rank_batch_time = {_text(batch)}")
    if cluster.copy_bandwidth:
        bandwidth = write_quantity(cluster.copy_bandwidth, "bandwidth")
        lines.append(f"copy_bandwidth = {_text(bandwidth)}")
    if cluster.notes:
        lines.append(f"notes = [{', '.join(map(_text, cluster.notes))}]")
    for kind in cluster.kinds:
        peaks = ", ".join(
            f"{dtype} = {_text(write_quantity(rate, 'flops'))}" for dtype, rate in kind.peak_flops
        )
        lines += ["", f"[kind.{_text(kind.name)}]", f"peak = {{ {peaks} }}"]
        lines += [
            f"memory = {_text(write_quantity(kind.memory_bytes, 'bytes'))}",
            f"memory_bandwidth = {_text(write_quantity(kind.memory_bandwidth, 'bandwidth'))}",
            f"backend = {_text(kind.backend)}",
            f"launch = {_text(write_quantity(kind.launch_seconds, 'seconds'))}",
            f"source = {_text(kind.source)}",
        ]
    runs = _runs(cluster)
    for index, switch in enumerate(cluster.switches):
        if not switch.is_host and switch.parent >= 0:
            lines += [
                "",
                "[[switch]]",
                f"name = {_text(switch.name)}",
                *_link(switch.link, "uplink", "latency", "source"),
            ]
            if switch.parent > 0:
                lines.append(f"parent = {_text(cluster.switches[switch.parent].name)}")
        elif switch.is_host:
            lines += _host_lines(cluster, switch, runs[index])
    return "\n".join(lines) + "\n"


def _runs(cluster: Cluster) -> list[list[tuple[Device, int]]]:
    """Return, of every switch, its neighbouring equal devices and how many they are."""
    runs: list[list[tuple[Device, int]]] = [[] for _ in cluster.switches]
    for device in cluster.devices:
        own = runs[device.host]
        if own and own[-1][0] == device:
            own[-1] = device, own[-1][1] + 1
        else:
            own.append((device, 1))
    return runs


def _host_lines(cluster: Cluster, host: Switch, runs: list[tuple[Device, int]]) -> list[str]:
    lines = ["", "[[host]]", f"name = {_text(host.name)}"]
    if host.address:
        lines.append(f"address = {_text(host.address)}")
    lines += _link(host.link, "uplink", "uplink_latency", "uplink_source")
    if host.parent > 0:
        lines.append(f"switch = {_text(cluster.switches[host.parent].name)}")
    if host.dollars_per_second:
        lines.append(f"price = {_text(write_quantity(host.dollars_per_second, 'price'))}")
    for device, count in runs:
        lines += [
            "[[host.device]]",
            f"kind = {_text(cluster.kinds[device.kind].name)}",
            f"count = {count}",
        ]
        lines += _link(device.link, "link", "link_latency", "link_source")
    return lines


def _link(link: Link | None, bandwidth: str, latency: str, source: str) -> list[str]:
    if link is None:
        return []
    return [
        f"{bandwidth} = {_text(write_quantity(link.bandwidth, 'bandwidth'))}",
        f"{latency} = {_text(write_quantity(link.latency, 'seconds'))}",
        f"{source} = {_text(link.source)}",
    ]


def _text(text: str) -> str:
    escaped = "".join(
        f"\\u{ord(c):04x}" if ord(c) < 32 or ord(c) == 127 else {"\\": "\\\\", '"': '\\"'}.get(c, c)
        for c in text
    )
    return f'"{escaped}"'


def commented_template() -> str:
    """Return the cluster file that ``shardwright init`` writes: valid, and explained."""
    return TEMPLATE
