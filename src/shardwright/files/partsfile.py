"""Parts files: which modules run on which devices, and how each part splits its work.

TOML; ``docs/reference/parts-file.md`` describes it. Nothing in a file is executed.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from shardwright.core.legality import MOST_DEVICES, MOST_MICROBATCHES
from shardwright.core.schedules import NamedSchedule
from shardwright.errors import InputError
from shardwright.files.complaints import explain
from shardwright.files.limits import parse_toml, read_text

MANUAL = "docs/reference/parts-file.md"
MAX_FILE_BYTES = 256 * 2**10
MOST_PARTS = 1024
MOST_MODULES = 1024  # of one part
MOST_ORDER = 200_000  # letters of a line
Degree = Annotated[int, Field(ge=1, le=MOST_DEVICES)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class PartTable(_Table):
    """``[[part]]``: modules, the devices they run on, and the degrees, data parallel if none is
    given."""

    modules: list[Annotated[str, Field(min_length=1, max_length=1000)]] = Field(
        min_length=1, max_length=MOST_MODULES
    )
    devices: list[Annotated[int, Field(ge=0, lt=MOST_DEVICES)]] = Field(min_length=1)
    data: Degree | None = None
    tensor: Degree = 1
    context: Degree = 1
    zero: Annotated[int, Field(ge=0, le=3)] = 0
    sequence: bool = False

    @model_validator(mode="after")
    def _fits(self) -> PartTable:
        if len(set(self.devices)) < len(self.devices):
            raise ValueError(f"devices {self.devices!s:.80} name one twice; name each once")
        others = self.tensor * self.context
        product = self.data_degree * others
        if product != len(self.devices):
            raise ValueError(
                f"data x tensor x context must be the number of devices, {len(self.devices)}, "
                f"not {product}; change a degree, or the devices"
            )
        return self

    @property
    def data_degree(self) -> int:
        """The degree of data parallelism: what the other degrees leave, where it is not given."""
        others = math.prod((self.tensor, self.context))
        return self.data if self.data is not None else max(1, len(self.devices) // others)


class PartsFile(_Table):
    """The whole file."""

    part: list[PartTable] = Field(min_length=1, max_length=MOST_PARTS)
    num_microbatches: Annotated[int, Field(ge=1, le=MOST_MICROBATCHES)] = 1
    schedule: NamedSchedule = "1f1b"
    order: list[Annotated[str, Field(max_length=MOST_ORDER)]] | None = None
    recompute: bool = False

    @model_validator(mode="after")
    def _has_one_order(self) -> PartsFile:
        if self.order is not None and "schedule" in self.model_fields_set:
            raise ValueError("an order and a schedule are both given; leave one out")
        return self


def read_parts(path: str | Path) -> PartsFile:
    """Read a parts file. Raises InputError with the place of the first thing that is wrong."""
    remedy = f"{MANUAL} shows one"
    text = read_text(path, MAX_FILE_BYTES, "a parts file", remedy)
    try:
        raw = parse_toml(text)
    except ValueError as error:
        raise InputError(f"{path}: {error}; {remedy}") from None
    try:
        return PartsFile.model_validate(raw)
    except ValidationError as error:
        raise InputError(f"{path}: {explain(error, PartsFile, MANUAL)}") from None
