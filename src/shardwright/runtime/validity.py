"""What must hold of a checkpoint before anything of it is used: the manifest in itself, and its files.

Checksums find damage by chance. This finds what no save writes: pieces that do not make up their
tensor, dtypes and shapes that disagree with the data, names that lead nowhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch

from shardwright.core.program import STATES
from shardwright.errors import CheckpointError
from shardwright.runtime.store import DTYPES
from shardwright.runtime.tables import Box, Manifest, ModuleTable, TensorTable
from shardwright.runtime.tensorfile import CODES, convertible, reading

STORED_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in CODES}
# A module may have tensors on the meta device of dtypes that no file holds.
MODULE_DTYPES = STORED_DTYPES | DTYPES
_MOST = 2**63 - 1
_ROWS = 256  # pieces that are compared with all others at a time


def check_manifest(manifest: Manifest) -> None:
    """Raise ValueError with the first place where a manifest contradicts itself."""
    room = sum(size for size, _ in manifest.files.values())
    taken: set[tuple[str, str]] = set()
    for key, table in manifest.tensors.items():
        _check_tensor(key, table, room)
        for box in table.pieces:
            _check_piece(key, table, box)
            if box.file not in manifest.files:
                raise ValueError(f"{key} is in {box.file}, which is not listed")
            place = (box.file, box.name or key)
            if place in taken:
                raise ValueError(f"{place[1]} of {box.file} is listed twice")
            taken.add(place)
        _check_cover(key, table)
    for name, entry in manifest.module.items():
        _check_module_table(name, entry, manifest)
    _check_groups(manifest)


def _check_tensor(key: str, table: TensorTable, room: int) -> None:
    if table.dtype not in STORED_DTYPES:
        raise ValueError(f"{key} has the unknown dtype {table.dtype[:40]!r}")
    count = math.prod(table.shape)
    if max(table.shape, default=0) > _MOST or count * STORED_DTYPES[table.dtype].itemsize > room:
        raise ValueError(f"{key} of shape {_shape_text(table.shape)} is larger than all files")


def _check_piece(key: str, table: TensorTable, box: Box) -> None:
    if not len(box.start) == len(box.size) == len(table.shape):
        raise ValueError(f"a piece of {key} has another number of dims than its tensor")
    if any(a + n > whole for a, n, whole in zip(box.start, box.size, table.shape, strict=True)):
        raise ValueError(f"a piece of {key} ends outside of its tensor")
    if box.name and not (box.name.startswith(f"{key}#") and box.name[len(key) + 1 :].isdigit()):
        raise ValueError(f"a piece of {key} is called {box.name[:80]!r}")


def _check_cover(key: str, table: TensorTable) -> None:
    """Check that the pieces make up the tensor: as many elements, and no element twice."""
    boxes = [box for box in table.pieces if math.prod(box.size)]
    found, count = sum(math.prod(box.size) for box in boxes), math.prod(table.shape)
    if found != count:
        raise ValueError(f"the pieces of {key} give {found} of {count} elements")
    if len(boxes) < 2:
        return
    low = np.array([box.start for box in boxes])
    high = low + np.array([box.size for box in boxes])
    for first in range(0, len(boxes), _ROWS):
        mine = slice(first, first + _ROWS)
        meets = (low[mine, None] < high[None]) & (low[None] < high[mine, None])
        if int(meets.all(axis=2).sum()) > len(boxes[mine]):  # each meets itself
            raise ValueError(f"the pieces of {key} overlap")


def _check_module_table(name: str, entry: ModuleTable, manifest: Manifest) -> None:
    dtype = MODULE_DTYPES.get(entry.dtype)
    if dtype is None:
        raise ValueError(f"{name} has the unknown dtype {entry.dtype[:40]!r}")
    if not entry.key:
        return
    table = manifest.tensors.get(entry.key)
    if table is None:
        raise ValueError(f"{name} is {entry.key[:200]!r}, which is not listed")
    if math.prod(table.shape) != math.prod(entry.shape):
        raise ValueError(
            f"{name} has shape {_shape_text(entry.shape)}, but its values {_shape_text(table.shape)}"
        )
    if not convertible(STORED_DTYPES[table.dtype], dtype):
        raise ValueError(f"{name} is {entry.dtype}, but its values are {table.dtype}")


def _check_groups(manifest: Manifest) -> None:
    members = [name for group in manifest.groups for name in group.names]
    for name in members:
        if name not in manifest.module:
            raise ValueError(f"an optimizer group has {name[:200]!r}, which the module lacks")
    lacks = "which the module lacks", set(manifest.module)
    homes = dict.fromkeys(STATES, lacks) | {
        "optimizer": ("that is in no optimizer group", set(members))
    }
    for key in (*manifest.tensors, *manifest.values):
        kind, _, rest = key.partition("/")
        if kind in homes:
            fault, known = homes[kind]
            if rest.partition("/")[2] not in known:
                raise ValueError(f"{key[:200]!r} is of a parameter {fault}")
        if key in manifest.values and kind != "optimizer":
            raise ValueError(f"{key[:200]!r} is no value of an optimizer")


def _listed(
    manifest: Manifest, files: Iterable[str]
) -> dict[str, dict[str, tuple[torch.dtype, list[int]]]]:
    """Return dtype and size of every tensor that should be in some files, by name."""
    listed: dict[str, dict[str, tuple[torch.dtype, list[int]]]] = {name: {} for name in files}
    for key, table in manifest.tensors.items():
        for box in table.pieces:
            if box.file in listed:
                about = (STORED_DTYPES[table.dtype], box.size)
                listed[box.file][box.name or key] = about
    return listed


def misfit(directory: Path, manifest: Manifest, files: Iterable[str]) -> str:
    """Return the first of some files whose tensors are not those that the manifest lists, with the
    reason; "" where all are. Reads their headers only."""
    with reading() as reader:
        for name, wanted in _listed(manifest, files).items():
            try:
                found = reader.outlines(directory / name)
            except CheckpointError as error:
                return f"{name}: {error}"
            for key in sorted(wanted.keys() ^ found.keys()):
                here = "the manifest" if key in found else "the file"
                return f"{name}: {here} lacks {key[:200]!r}"
            for key, (dtype, size) in wanted.items():
                outline = found[key]
                if outline.dtype != dtype or list(outline.shape) != size:
                    return (
                        f"{name}: {key[:200]!r} is {outline.dtype} of shape "
                        f"{_shape_text(outline.shape)} there, {dtype} of {_shape_text(size)} here"
                    )
    return ""


def _shape_text(shape: Sequence[int]) -> str:
    return "x".join(f"{size:.4g}" if size > _MOST else str(size) for size in shape[:9]) or "()"
