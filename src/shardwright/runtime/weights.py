"""Weights alone, in the safetensors format of everyone: out of a checkpoint or an executor, and in.

A file holds what ``module.state_dict()`` does, under its names and in its dtypes, tied names twice,
so that ``module.load_state_dict(safetensors.torch.load_file(path))`` takes it as it is.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from shardwright.errors import CheckpointError
from shardwright.runtime import manifest as book
from shardwright.runtime.agreement import rank, together
from shardwright.runtime.capture import seen_as
from shardwright.runtime.checkpoint import open_checkpoint
from shardwright.runtime.gather import kept_values, whole_tensor
from shardwright.runtime.interpreter import Machine
from shardwright.runtime.state import idle_tensors, lasting, module_tables
from shardwright.runtime.store import DTYPES
from shardwright.runtime.tables import ModuleTable
from shardwright.runtime.tensorfile import (
    Outline,
    Stored,
    contents,
    in_file_order,
    reading,
    seen_in,
    write,
)


def export_checkpoint(root: str | Path, path: str | Path) -> Path:
    """Write a checkpoint's weights as one safetensors file, without its model and without ranks.

    The memory of one tensor is needed. Raises CheckpointError.
    """
    directory, content = open_checkpoint(Path(root), alone=True)
    with reading() as reader:
        outlines, tensors = _streamed(
            content.module, lambda key: reader.whole(book.stored(directory, content, key))
        )
        return _write_whole(Path(path), outlines, tensors)


def export(machine: Machine, path: str | Path) -> Path:
    """Write the present weights as one safetensors file. A collective call."""
    graph = machine.captured.graph.tensors
    kept = {f"{graph[t].role}/{graph[t].name}": value for t, value in kept_values(machine).items()}
    idle = idle_tensors(machine)

    def fetch(key: str) -> Tensor:
        return idle[key] if key in idle else whole_tensor(machine, kept[key])

    outlines, tensors = _streamed(module_tables(machine.parameters.module), fetch)

    def act() -> Path | None:
        try:
            return _write_whole(Path(path), outlines, tensors) if rank() == 0 else None
        finally:
            for _ in tensors:  # the other ranks send their shards, whatever becomes of the file
                pass

    together(act)
    return Path(path)


def _streamed(
    tables: Mapping[str, ModuleTable], fetch: Callable[[str], Tensor]
) -> tuple[list[Outline], Iterator[Tensor]]:
    """Return the outlines of a state dict in file order, and its tensors, made when asked for."""
    tables = {name: table for name, table in tables.items() if table.persistent}
    empty = [name for name, table in tables.items() if not table.key]
    if empty:
        raise CheckpointError(
            f"every tensor of a model must have values to be exported, but {empty[0]!r} was on "
            "the meta device; build the model on the CPU"
        )
    outlines = in_file_order(
        Outline(name, DTYPES[table.dtype], tuple(table.shape)) for name, table in tables.items()
    )
    return outlines, (
        seen_as(fetch(tables[one.name].key), one.shape).to(one.dtype) for one in outlines
    )


def _write_whole(path: Path, outlines: list[Outline], tensors: Iterator[Tensor]) -> Path:
    """Write a file beside its place and rename it."""
    if not path.name or path.is_dir():
        raise CheckpointError(
            f"weights are written to a file, but {path} is a folder; name a file in it"
        )
    partial = path.with_name(f".{path.name}.tmp-{os.urandom(4).hex()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(partial, outlines, tensors)
        partial.replace(path)
    except OSError as error:
        raise CheckpointError(
            f"the weights could not be written to {path}: {error}; free space or choose another "
            "path"
        ) from error
    finally:
        with contextlib.suppress(OSError):  # where it could not be, either
            partial.unlink(missing_ok=True)
    return path


def load_weights(machine: Machine, path: str | Path) -> None:
    """Start from the weights of a safetensors file, or of a folder of them. A collective call.

    Optimizer state and step stay as they are; dtypes are converted. Raises CheckpointError with
    all names that are missing, unexpected or of another shape.
    """
    together(lambda: _load_weights(machine, Path(path)))


def _load_weights(machine: Machine, path: Path) -> None:
    tables = module_tables(machine.parameters.module)
    with torch.no_grad(), reading() as reader:
        saved = contents(reader, path)
        chosen = _matched(path, tables, saved)
        for held in lasting(machine):
            if held.key in chosen:
                reader.read(seen_in(chosen[held.key], held.shape), held.start, held.local)
        for key, tensor in idle_tensors(machine).items():
            if key in chosen:
                reader.read(chosen[key], (0,) * tensor.dim(), tensor)


def _matched(
    path: Path, tables: Mapping[str, ModuleTable], saved: Mapping[str, Stored]
) -> dict[str, Stored]:
    """Return the saved tensor of each key of a module, found by any of its names."""
    chosen: dict[str, Stored] = {}
    lines = [f"{name}: only in the file" for name in saved if name not in tables]
    for name, table in tables.items():
        if name not in saved:
            continue
        chosen[table.key] = saved[name]
        if saved[name].shape != tuple(table.shape):
            lines.append(f"{name}: shape {saved[name].shape} saved, {tuple(table.shape)} here")
    lines += [
        f"{name}: the file lacks it"
        for name, table in tables.items()
        if table.persistent and table.key not in chosen
    ]
    if lines:
        listed = "\n  ".join(lines)
        raise CheckpointError(
            f"weights must fit the model, but {path} differs in {len(lines)} places:\n  {listed}\n"
            "export the weights of this model, or rename the tensors"
        )
    return chosen
