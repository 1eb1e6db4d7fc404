"""The tables of a checkpoint's manifest: what it lists, as pydantic checks it."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0, lt=2**63)]
Sizes = list[Count]
FileName = Annotated[str, Field(pattern=r"^rank-\d+\.safetensors$")]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Box(_Table):
    """A piece of a tensor: the file it is in, and where in the whole it begins and ends. ``name``:
    what it is called there, "" where that is the tensor's key."""

    file: FileName
    start: Sizes
    size: Sizes
    name: str = ""


class TensorTable(_Table):
    """A stored tensor."""

    dtype: str
    shape: Sizes
    pieces: list[Box]


class ModuleTable(_Table):
    """A parameter or buffer as the trained module declares it. ``key`` is where its values are
    ("" where it had none), equal for tied names; ``persistent``: it belongs to the state dict."""

    dtype: str
    shape: Sizes
    key: str
    persistent: bool


class Group(_Table):
    """Settings of an optimizer's parameter group, its position, and its members on all ranks."""

    position: Count
    settings: dict[str, Any]
    names: list[str]


class ScaleTable(_Table):
    """Where loss scaling stands: the scale, steps since it changed, steps skipped so far."""

    scale: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    good_steps: Count
    skipped: Count


class Manifest(_Table):
    """What ``manifest.json`` holds. ``values``: optimizer state that is no tensor, by key.
    ``loss_scale``: None where the loss was not scaled."""

    step: Count
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)]
    model: str
    module: dict[str, ModuleTable]
    tensors: dict[str, TensorTable]
    groups: list[Group]
    values: dict[str, Any]
    extra: Any
    files: dict[FileName, tuple[Count, Count]]
    loss_scale: ScaleTable | None = None
