"""Checkpoints that any plan can load: one directory per saved step, written atomically.

Parameters and optimizer state are written as DTensors by name through
``torch.distributed.checkpoint``, so that another plan, another world size or a plain module reads
what it needs of them. ``manifest.json`` holds everything that is not a tensor, with the size and
CRC-32 of every file; the directory gets its name only when all of it is on disk. ``latest`` names
the newest one. The format's own index is a pickle: load only checkpoints that you trust.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardwright.core.layout import shard_dim, split_order
from shardwright.errors import CheckpointError
from shardwright.runtime.interpreter import Machine

FORMAT = 1
MANIFEST, LATEST = "manifest.json", "latest"
KEPT = 2  # newest checkpoints that a save leaves in the directory
T = TypeVar("T")


# -- saving ----------------------------------------------------------------------------------------


def save(
    machine: Machine, optimizer: torch.optim.Optimizer, root: Path, extra: Mapping[str, Any]
) -> Path:
    """Write a checkpoint of the present step and return its directory. A collective call."""
    final = root / f"step-{machine.clock.step:08d}"
    partial = root / f"{final.name}.tmp-{_from_first(lambda: os.urandom(4).hex())}"
    groups = _merged_groups(optimizer)
    facts = {
        "format": FORMAT,
        "step": machine.clock.step,
        "seed": next(iter(machine.sites.values())).source.seed,
        "model": machine.captured.graph.name,
        "groups": groups,
        "extra": dict(extra),
    }
    try:
        _from_first(lambda: partial.mkdir(parents=True))
        state = _tensors(machine) | _optimizer_tensors(machine, optimizer)
        writer = FileSystemWriter(partial, single_file_per_rank=True, sync_files=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # one process is not an accident here
            dcp.save(state, storage_writer=writer, no_dist=_world_size() == 1)
        _from_first(lambda: _publish(partial, final, facts))
    except (Exception, CheckpointException) as error:  # the latter is no Exception
        if _rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(
            f"the checkpoint {final} could not be written: {_cause(error)}; earlier checkpoints "
            "are unharmed: free space or choose another directory"
        ) from error
    return final


def _cause(error: BaseException) -> str:
    """Return the first rank's own error where torch wraps those of all ranks."""
    failures = getattr(error, "failures", None)
    if isinstance(failures, dict) and failures:
        first = failures[min(failures)]
        return str(first[0] if isinstance(first, tuple) else first)
    return str(error)


def _publish(partial: Path, final: Path, facts: Mapping[str, Any]) -> None:
    """Complete a written directory and give it its name: the moment it exists."""
    files = sorted(path for path in partial.iterdir() if path.is_file())
    sums = {path.name: [path.stat().st_size, _crc(path)] for path in files}
    _write(partial / MANIFEST, json.dumps({**facts, "files": sums}, indent=1))
    _sync(partial)
    replaced = final.with_name(f"{final.name}.replaced")
    if final.exists():
        final.rename(replaced)
    partial.rename(final)
    _write(final.parent / f"{LATEST}.tmp", final.name)
    (final.parent / f"{LATEST}.tmp").replace(final.parent / LATEST)
    _sync(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)
    complete = sorted(p for p in final.parent.glob("step-*") if p.name[5:].isdigit())
    for old in complete[:-KEPT]:
        if old != final:
            shutil.rmtree(old, ignore_errors=True)


def _write(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _crc(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            crc = zlib.crc32(piece, crc)
    return crc


# -- loading ---------------------------------------------------------------------------------------


def load(machine: Machine, optimizer: torch.optim.Optimizer, root: Path) -> dict[str, Any]:
    """Load the newest checkpoint under ``root`` (or ``root`` itself). A collective call."""
    directory, facts = _open(root)
    reader = FileSystemReader(directory)
    saved = _index(reader, directory)
    known = {machine.captured.graph.tensors[i].name for i in machine.captured.graph.parameters}
    missing = sorted(name for name in known if f"parameter.{name}" not in saved)
    if missing:
        raise CheckpointError(
            f"a checkpoint must hold every parameter of the model, but {directory} (of model "
            f"{facts['model']!r}) lacks {missing[0]!r}; load one that was made for this model"
        )
    fresh = _empty_optimizer_tensors(machine, saved)
    _read(_tensors(machine) | fresh, directory)
    _read(_rest(machine), directory)
    by_name = {master.name: master.parameter for master in machine.parameters.masters}
    optimizer.state.clear()
    for key, tensor in fresh.items():
        name, _, entry = key.removeprefix("optimizer.").rpartition(".")
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        optimizer.state[by_name[name]][entry] = local
    for group, settings in zip(optimizer.param_groups, facts["groups"], strict=False):
        for key, value in settings.items():
            group[key] = tuple(value) if isinstance(group.get(key), tuple) else value
    machine.clock.step = facts["step"]
    for site in machine.sites.values():
        site.source.seed = facts["seed"]
    return dict(facts["extra"])


def load_into_module(root: str | Path, module: nn.Module) -> int:
    """Load parameters and buffers into a plain module, on this process alone; return the step."""
    directory, facts = _open(Path(root), alone=True)
    state: dict[str, Tensor] = {}
    for key in _index(FileSystemReader(directory), directory):
        kind, _, name = key.partition(".")
        try:
            if kind == "parameter":
                state[key] = module.get_parameter(name).detach()
            elif kind == "buffer":
                state[key] = module.get_buffer(name).detach()
        except AttributeError as error:
            raise CheckpointError(
                f"the module must have what the checkpoint holds, but {name!r} of {directory} is "
                "not in it; build the module that was trained"
            ) from error
    _read(state, directory, alone=True)
    return int(facts["step"])


def _open(root: Path, *, alone: bool = False) -> tuple[Path, dict[str, Any]]:
    """Find a checkpoint, check its files against the manifest, and return both."""
    directory = root
    try:
        if (root / LATEST).exists():
            directory = root / (root / LATEST).read_text().strip()
        facts = json.loads((directory / MANIFEST).read_text())
        files, version = facts["files"], facts["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"a checkpoint must have a readable {MANIFEST}, but {directory / MANIFEST} has none "
            f"({error}); name a directory that a run has saved to"
        ) from error
    if version != FORMAT:
        raise CheckpointError(
            f"checkpoint format {version} of {directory} is not the known format {FORMAT}; "
            "load it with the version that wrote it"
        )
    share = slice(None) if alone else slice(_rank(), None, _world_size())
    damaged = [
        name for name in sorted(files)[share] if not _is_sound(directory / name, files[name])
    ]
    if not alone and _world_size() > 1:
        everyone: list[Any] = [None] * _world_size()
        dist.all_gather_object(everyone, damaged)
        damaged = [name for names in everyone for name in names]
    if damaged:
        raise CheckpointError(
            f"every file of a checkpoint must be as it was written, but {directory / damaged[0]} "
            f"is missing or damaged; load an earlier checkpoint of {directory.parent}"
        )
    return directory, facts


def _is_sound(path: Path, expected: Any) -> bool:
    try:
        return [path.stat().st_size, _crc(path)] == expected
    except OSError:
        return False


def _index(reader: FileSystemReader, directory: Path) -> dict[str, Any]:
    try:
        return dict(reader.read_metadata().state_dict_metadata)
    except Exception as error:  # whatever a damaged pickle may raise
        raise CheckpointError(
            f"{directory / '.metadata'} cannot be read ({error}); load an earlier checkpoint"
        ) from error


def _read(state: dict[str, Any], directory: Path, *, alone: bool = False) -> None:
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            reader = FileSystemReader(directory)
            dcp.load(state, storage_reader=reader, no_dist=alone or _world_size() == 1)
    except Exception as error:
        raise CheckpointError(
            f"{directory} does not fit this model: {error}; load one that was made for it"
        ) from error


# -- tensors by name -------------------------------------------------------------------------------


def _tensors(machine: Machine) -> dict[str, Any]:
    """Return this rank's masters, frozen parameters and buffers, ready to be written or read."""
    raw, tensors = machine.parameters.raw, machine.captured.graph.tensors
    values = machine.program.values
    state = {
        f"parameter.{master.name}": _as_dtensor(machine, master.value, raw[master.value])
        for master in machine.parameters.masters
    }
    for index in machine.parameters.refresh_rest():
        name = f"parameter.{tensors[values[index].tensor].name}"
        if name not in state:
            state[name] = _as_dtensor(machine, index, raw[index])
    for index, name in machine.parameters.buffers.items():
        state.setdefault(f"buffer.{name}", _as_dtensor(machine, index, raw[index]))
    return state


def _rest(machine: Machine) -> dict[str, Any]:
    """Return the parameters at rest which have a separate master: they are read from it."""
    values, tensors = machine.program.values, machine.captured.graph.tensors
    return {
        f"parameter.{tensors[values[index].tensor].name}": _as_dtensor(
            machine, index, machine.parameters.raw[index]
        )
        for index in machine.parameters.refresh_rest()
    }


def _as_dtensor(machine: Machine, value: int, local: Tensor) -> Any:
    """Return a local shard as a DTensor of the whole; where there is one rank, as it is.

    The mesh's axes are put into the order in which they split this tensor, so that plain shards say
    it all, inner ones included.
    """
    entry = machine.program.values[value]
    mesh = machine.program.meshes[entry.mesh]
    if _world_size() == 1 or not mesh.axes or all(shard_dim(p) < 0 for p in entry.layout):
        return local
    ranks = torch.tensor([machine.rank_of[device] for device in mesh.devices])
    order = list(split_order(entry.layout))
    order += [axis for axis in range(len(mesh.axes)) if axis not in order]
    device_mesh = DeviceMesh(
        local.device.type,
        ranks.view(mesh.sizes).permute(order),
        mesh_dim_names=tuple(mesh.axes[axis] for axis in order),
        _init_backend=False,
    )
    dims = [shard_dim(entry.layout[axis]) for axis in order]
    placements = [Shard(dim) if dim >= 0 else Replicate() for dim in dims]
    shape = torch.Size(machine.captured.graph.tensors[entry.tensor].shape)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, device_mesh, placements, run_check=False, shape=shape, stride=stride
    )


def _optimizer_tensors(machine: Machine, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the optimizer state by parameter name: shards as DTensors, scalars as tensors."""
    state: dict[str, Any] = {}
    for master in machine.parameters.masters:
        for key, entry in optimizer.state.get(master.parameter, {}).items():
            name = f"optimizer.{master.name}.{key}"
            value = torch.tensor(entry) if isinstance(entry, (int, float)) else entry
            if not isinstance(value, Tensor):
                continue
            if value.shape == master.parameter.shape:
                state[name] = _as_dtensor(machine, master.value, value)
            elif value.numel() == 1 or not _is_sharded(machine, master.value):
                state[name] = value
            else:
                raise CheckpointError(
                    f"optimizer state {key!r} of {master.name!r} has shape {tuple(value.shape)}, "
                    "unlike its sharded parameter, so no other plan could load it; use a plan "
                    "without ZeRO for this optimizer"
                )
    return state


def _is_sharded(machine: Machine, value: int) -> bool:
    return any(shard_dim(placement) >= 0 for placement in machine.program.values[value].layout)


def _empty_optimizer_tensors(machine: Machine, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return memory for the saved optimizer state of this rank's masters."""
    state: dict[str, Any] = {}
    for master in machine.parameters.masters:
        tensor = machine.program.values[master.value].tensor
        whole = torch.Size(machine.captured.graph.tensors[tensor].shape)
        prefix = f"optimizer.{master.name}."
        for key in (key for key in saved if key.startswith(prefix)):
            if "." in key[len(prefix) :]:
                continue  # belongs to a parameter whose name begins with this one
            entry = saved[key]
            dtype = entry.properties.dtype
            if entry.size == whole:
                local = torch.zeros_like(master.parameter, dtype=dtype, requires_grad=False)
                state[key] = _as_dtensor(machine, master.value, local)
            else:
                state[key] = torch.zeros(entry.size, dtype=dtype)
    return state


def _merged_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return each parameter group's settings as JSON holds them; they are equal on all ranks."""
    settings: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        plain = {
            key: value.item() if isinstance(value, Tensor) else value
            for key, value in group.items()
            if key not in ("params", "param_names")
        }
        simple = (bool, int, float, str, tuple, list, type(None))
        settings.append({key: value for key, value in plain.items() if isinstance(value, simple)})
    return settings


# -- the world -------------------------------------------------------------------------------------


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _from_first(act: Callable[[], T]) -> T:
    """Do something on rank 0 and return its result on all ranks, or raise its error on all."""
    outcome: list[Any] = [None, None]
    if _rank() == 0:
        try:
            outcome[0] = act()
        except OSError as error:
            outcome[1] = error
    if _world_size() > 1:
        dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]
