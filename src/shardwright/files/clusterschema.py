"""What a cluster file may hold: its tables, checked by pydantic, and how a complaint reads."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from shardwright.core.cluster import MOST_SLOWDOWN, Source
from shardwright.core.legality import MOST_DEVICES
from shardwright.errors import InputError
from shardwright.files.presets import INTER_LATENCY, suggest
from shardwright.files.units import Quantity, is_in_range, range_text, read_quantity

MAX_DEVICES = MOST_DEVICES
MANUAL = "docs/reference/cluster-file.md"
# By a word in pydantic's name of a complaint.
_REMEDIES = {
    "literal": "choose one of these",
    "int_": "write a whole number, without quotes",
    "float_": "write a number, without quotes",
    "string_too": "give a name of 1 to 200 characters",
    "string": "write text in quotes",
    "greater": "give a number within the bound",
    "less": "give a number within the bound",
    "too_short": "describe at least one",
    "model": "write a table with keys, as [[host]] or [kind.NAME]",
    "dict": "write a table with keys, as [[host]] or [kind.NAME]",
    "tuple": "write a list in square brackets, or tables in double ones",
}


def _reader(quantity: Quantity, *, zero: bool = False) -> BeforeValidator:
    def read(text: object) -> float:
        try:
            return read_quantity(text, quantity, zero=zero)
        except InputError as error:
            raise ValueError(str(error)) from None

    return BeforeValidator(read)


def _checked_rate(rate: float) -> float:
    if not is_in_range(rate, zero=True):
        raise ValueError(
            f"a rate is {range_text(zero=True)}, not {rate:g}; give samples per second"
        )
    return rate


Rate = Annotated[float, Field(strict=False), AfterValidator(_checked_rate)]
Bytes = Annotated[float, _reader("bytes")]
Bandwidth = Annotated[float, _reader("bandwidth")]
Latency = Annotated[float, _reader("seconds", zero=True)]
Flops = Annotated[float, _reader("flops")]
Price = Annotated[float, _reader("price", zero=True)]
Name = Annotated[str, Field(min_length=1, max_length=200)]
Count = Annotated[int, Field(ge=1, le=MAX_DEVICES)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class KindTable(_Table):
    """``[kind.NAME]``: a device that is no preset, or is to differ from one."""

    peak: dict[str, Flops] = Field(min_length=1)
    memory: Bytes
    memory_bandwidth: Bandwidth
    backend: Literal["cpu", "cuda"] = "cuda"
    launch: Latency = 5e-6
    source: Source = "published"


class DeviceTable(_Table):
    """``[[host.device]]``: some of a host's devices, where they are not all equal."""

    kind: Name
    count: Count = 1
    link: Bandwidth | None = None
    link_latency: Latency | None = None
    link_source: Source = "published"


class HostTable(_Table):
    """``[[host]]``: ``count`` equal hosts."""

    name: Name = "host"
    count: Count = 1
    preset: Name | None = None
    address: Annotated[str, Field(max_length=253)] = ""
    kind: Name | None = None
    devices: Count | None = None
    device: tuple[DeviceTable, ...] = Field(default=(), strict=False)
    link: Bandwidth | None = None
    link_latency: Latency | None = None
    link_source: Source = "published"
    uplink: Bandwidth | None = None
    uplink_latency: Latency | None = None
    uplink_source: Source = "published"
    switch: Name | None = None
    price: Price | None = None


class SwitchTable(_Table):
    """``[[switch]]``: a rack or other level between hosts and the root of the network."""

    name: Name
    uplink: Bandwidth
    latency: Latency = INTER_LATENCY
    source: Source = "published"
    parent: Name | None = None


class ClusterTable(_Table):
    """The whole file."""

    name: Name = "cluster"
    overlap_slowdown: Annotated[float, Field(ge=1, le=MOST_SLOWDOWN, strict=False)] = 1.0
    software: Literal[
        "eager-2023",
        "eager",
        "compiled",
        "compiled-async",
        "megatron",
        "megatron-core",
        "internevo",
    ] = "eager"
    input_rate: Rate = 0.0
    rank_input_rate: Rate = 0.0
    host_input_rate: Rate = 0.0
    host_fetch_rate: Rate = 0.0
    copy_bandwidth: Bandwidth | None = None
    notes: tuple[str, ...] = Field(default=(), strict=False)
    kind: dict[str, KindTable] = {}
    switch: tuple[SwitchTable, ...] = Field(default=(), strict=False)
    host: tuple[HostTable, ...] = Field(min_length=1, strict=False)


def explain(error: ValidationError) -> str:
    """Say what is wrong at the first place where something is."""
    first = error.errors(include_url=False, include_context=False)[0]
    place = [part for part in first["loc"] if part != "__key__"]
    path = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in place).lstrip(".")
    path = f"{path[:100]} ... {path[-100:]}" if len(path) > 210 else path
    if first["type"] == "extra_forbidden":
        known = _fields_at(place[:-1])
        return f"unknown key {path!r}{suggest(str(place[-1])[:80], known)}"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        return f"{path}: this key is needed; add it, {MANUAL} says what it means"
    if first["type"] == "value_error":  # a quantity: with its own remedy
        return f"{path}: {message}"
    return f"{path}: {message}, not {first['input']!r:.80}; {_remedy(first['type'])}"


def _remedy(kind: str) -> str:
    """Return what to do about pydantic's sort of complaint."""
    for word, remedy in _REMEDIES.items():
        if word in kind:
            return remedy
    return f"write it as {MANUAL} says"


def _fields_at(place: list[Any]) -> tuple[str, ...]:
    """Return the keys allowed in the table at a path."""
    table: type[BaseModel] = ClusterTable
    inner: dict[tuple[type[BaseModel], str], type[BaseModel]] = {
        (ClusterTable, "kind"): KindTable,
        (ClusterTable, "switch"): SwitchTable,
        (ClusterTable, "host"): HostTable,
        (HostTable, "device"): DeviceTable,
    }
    for part in place:
        table = inner.get((table, str(part)), table)
    return tuple(table.model_fields)
