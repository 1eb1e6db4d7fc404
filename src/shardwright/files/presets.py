"""Published hardware: device kinds, node shapes and prices out of ``files/hardware.csv``.

Every row of that file names its source and whether it was verified. Nothing here is measured.
"""

from __future__ import annotations

import csv
import difflib
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources

from shardwright.core.cluster import DeviceKind, Link
from shardwright.errors import InputError

# What people say for the variant that is usually meant.
ALIASES = {
    "v100": "V100-SXM2-32GB", "v100sxm2": "V100-SXM2-32GB", "a100": "A100-SXM4-80GB",
    "a10040gb": "A100-SXM4-40GB",
    "a10080gb": "A100-SXM4-80GB", "h100": "H100-SXM5-80GB", "h100sxm": "H100-SXM5-80GB",
    "h100pcie": "H100-PCIe-80GB", "h200": "H200-SXM", "b200": "B200-SXM", "b300": "B300-SXM",
    "gb200": "GB200-SXM", "gb300": "GB300-SXM", "h800": "H800-SXM", "1080ti": "GTX-1080Ti",
    "a800": "A800-SXM4-80GB", "a6000": "RTX-A6000", "4090": "RTX-4090", "3090": "RTX-3090",
    "6000ada": "RTX-6000-Ada", "h20": "H20-SXM", "gh200": "GH200-96GB",
}  # fmt: skip
# The node whose network is assumed when only a device kind is named.
USUAL_NODE = {
    "V100-SXM2-32GB": "DGX-2", "V100-SXM2-16GB": "DGX-1 (V100)", "A100-SXM4-80GB": "DGX A100",
    "A100-SXM4-40GB": "DGX A100", "H100-SXM5-80GB": "DGX H100",
}  # fmt: skip

INTRA_LATENCY = 2e-6
INTER_LATENCY = 5e-6
_RATES = {"peak_fp32": "float32", "peak_fp16_dense": "float16", "peak_bf16_dense": "bfloat16",
          "peak_fp8_dense": "float8"}  # fmt: skip
_MARKET = {"A100-SXM4-80GB": "A100-80 per GPU-hour", "H100-SXM5-80GB": "H100-SXM per GPU-hour",
           "H200-SXM": "H200-SXM per GPU-hour"}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePreset:
    """A published host shape. ``uplink`` is bytes/s per host one way, ``price`` dollars/s."""

    name: str
    kind: str
    num_devices: int
    uplink: float
    price: float
    note: str


@cache
def _rows() -> tuple[dict[str, str], ...]:
    text = resources.files("shardwright.files").joinpath("hardware.csv").read_text("utf-8")
    return tuple(csv.DictReader(text.splitlines()))


def plain(name: str) -> str:
    """Return a name for comparison: lower case letters and digits only."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


@cache
def _facts(kind: str, name: str) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for row in _rows():
        if row["kind"] == kind and row["name"] == name:
            found.setdefault(row["metric"], row)
    return found


@cache
def kind_names() -> tuple[str, ...]:
    """Return the names of all device kinds with a memory size."""
    return tuple(r["name"] for r in _rows() if r["kind"] == "gpu" and r["metric"] == "memory")


@cache
def node_names() -> tuple[str, ...]:
    """Return the names of all node presets."""
    return tuple(r["name"] for r in _rows() if r["kind"] == "node" and r["metric"] == "gpus")


def find_kind(name: str) -> str | None:
    """Return the full name of a device kind from what people call it, None when unknown."""
    wanted = plain(name)
    names = {plain(full): full for full in kind_names()}
    if wanted in names:
        return names[wanted]
    if wanted in ALIASES:
        return ALIASES[wanted]
    starting = [full for short, full in names.items() if wanted and short.startswith(wanted)]
    return starting[0] if len(starting) == 1 else None


def device_kind(name: str) -> tuple[DeviceKind, Link]:
    """Return a published device and its link within the host: NVLink or xGMI, else PCIe."""
    full = find_kind(name)
    if full is None:
        known = (*kind_names(), *(alias.upper() for alias in ALIASES))
        raise InputError(f"there is no device kind {name[:80]!r}{suggest(name, known)}")
    facts = _facts("gpu", full)
    rates = tuple(
        (dtype, float(facts[metric]["value"]) * 1e12)
        for metric, dtype in _RATES.items()
        if metric in facts
    )
    near = facts.get("nvlink_or_xgmi_unidirectional") or facts["pcie_x16_unidirectional"]
    # "80 GB" on the box are 80 x 2^30 bytes for one vendor and 10^9 for another: ask the driver.
    reported = facts.get("memory_reported")
    memory = float(facts["memory"]["value"]) * 1e9
    kind = DeviceKind(
        name=full,
        peak_flops=rates,
        memory_bytes=float(reported["value"]) * 2**30 if reported else memory,
        memory_bandwidth=float(facts["memory_bandwidth"]["value"]) * 1e9,
    )
    link = Link(latency=INTRA_LATENCY, bandwidth=float(near["value"]) * 1e9, source="published")
    return kind, link


def find_node(name: str) -> NodePreset | None:
    """Return a node preset; the vendor's name may be left out (``p5.48xlarge``)."""
    wanted = plain(name)
    for full in node_names():
        short = plain(full)
        if wanted and wanted in (short, short.removeprefix(plain(full.split()[0]))):
            return _node(full)
    return None


def _node(name: str) -> NodePreset:
    facts = _facts("node", name)
    kind = find_kind(facts["gpus"]["unit"]) or facts["gpus"]["unit"]
    price = _facts("price", name).get("on_demand")
    dollars = float(price["value"]) / 3600 if price else 0.0
    cost = f"price {price['value']} USD/h ({price['condition']})" if price else "no published price"
    note = f"host as {name}: network {facts['nic']['condition']}; {cost}"
    return NodePreset(
        name=name,
        kind=kind,
        num_devices=int(facts["gpus"]["value"]),
        uplink=float(facts["nic"]["value"]) * 1e9 / 8,
        price=dollars,
        note=note,
    )


def usual_node(kind: str) -> NodePreset | None:
    """Return the node whose network is assumed for a device kind, None when none is known."""
    name = USUAL_NODE.get(kind)
    if name is not None:
        return _node(name)
    return next((node for node in map(_node, node_names()) if node.kind == kind), None)


def market_price(kind: str) -> tuple[float, str]:
    """Return (dollars per second, a sentence) for one device: the middle of the published range."""
    fact = _facts("price", "market ranges").get(_MARKET.get(kind, ""))
    if fact is None:
        return 0.0, f"no published price for {kind}: dollars are zero"
    low, high = map(float, fact["value"].split("-"))
    middle = (low + high) / 2
    return (
        middle / 3600,
        f"price {middle:g} USD/h per device, middle of {fact['value']} ({fact['condition']})",
    )


def suggest(name: str, known: tuple[str, ...]) -> str:
    """Return the end of an error message: the nearest known name, and all of them."""
    by_plain = {plain(full): full for full in known}
    near = difflib.get_close_matches(plain(name), by_plain, n=1, cutoff=0.5)
    meant = f"; did you mean {by_plain[near[0]]!r}?" if near else ";"
    return f"{meant} known are {', '.join(known)}"
