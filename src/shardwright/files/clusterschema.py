"""What a cluster file may hold: its tables, checked by pydantic."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from shardwright.core.cluster import MOST_SLOWDOWN, Source
from shardwright.core.legality import MOST_DEVICES
from shardwright.errors import InputError
from shardwright.files.presets import INTER_LATENCY
from shardwright.files.units import Quantity, is_in_range, range_text, read_quantity

MAX_DEVICES = MOST_DEVICES
MANUAL = "docs/reference/cluster-file.md"


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
    rank_batch_time: Latency = 0.0
    host_cores: Rate = 0.0
    copy_bandwidth: Bandwidth | None = None
    notes: tuple[str, ...] = Field(default=(), strict=False)
    kind: dict[str, KindTable] = {}
    switch: tuple[SwitchTable, ...] = Field(default=(), strict=False)
    host: tuple[HostTable, ...] = Field(min_length=1, strict=False)
