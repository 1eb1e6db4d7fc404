"""Safetensors files: written in one pass together with their checksum, read slice by slice.

The writer is our own, since it streams: one tensor is in memory at a time, the CRC-32 is taken on
the way, and a full disk is an ``OSError``. Reading is the ``safetensors`` library's, which maps the
file and touches only the bytes of the slices that are asked for.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shardwright.errors import CheckpointError

CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL", torch.complex64: "C64",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
DTYPES = {code: dtype for dtype, code in CODES.items()}


@dataclass(frozen=True, slots=True)
class Outline:
    """One tensor of a file: its name, dtype and shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a stored tensor: the tensor ``key`` of ``file`` begins at ``start`` of the whole."""

    file: Path
    key: str
    start: tuple[int, ...]
    size: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor that lies on disk in one piece or several."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def keys(self) -> str:
        """What it is called in its files, for complaints."""
        return ", ".join(sorted({piece.key for piece in self.pieces})) or "a tensor"


def seen_in(stored: Stored, shape: Sequence[int]) -> Stored:
    """Return a tensor stored in one piece as if it had been stored in another shape."""
    if stored.shape == tuple(shape):
        return stored
    (piece,) = stored.pieces
    seen = Piece(piece.file, piece.key, (0,) * len(shape), tuple(shape))
    return Stored(stored.dtype, tuple(shape), (seen,))


# -- writing ---------------------------------------------------------------------------------------


def in_file_order(outlines: Iterable[Outline]) -> list[Outline]:
    """Return tensors in the order in which a file holds them: wide dtypes first keeps all aligned."""
    return sorted(outlines, key=lambda outline: (-outline.dtype.itemsize, outline.name))


def write(path: Path, outlines: Sequence[Outline], tensors: Iterable[Tensor]) -> tuple[int, int]:
    """Write tensors, given in the order of ``in_file_order``; return the file's (bytes, CRC-32).

    All of it is on disk when this returns. Raises OSError when the disk refuses, and
    CheckpointError for a dtype that the format does not have.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for outline in outlines:
        code = CODES.get(outline.dtype)
        if code is None:
            raise CheckpointError(
                f"a tensor must have a dtype that safetensors knows, but {outline.name!r} is "
                f"{outline.dtype}; convert it"
            )
        offsets = [end, end + outline.nbytes]
        header[outline.name] = {
            "dtype": code, "shape": list(outline.shape), "data_offsets": offsets,
        }  # fmt: skip
        end = offsets[1]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    crc = size = 0
    with path.open("wb") as file:
        pieces = (len(text).to_bytes(8, "little"), text)
        for piece in (*pieces, *(_bytes(tensor) for tensor in tensors)):
            file.write(piece)
            crc, size = zlib.crc32(piece, crc), size + len(piece)
        file.flush()
        os.fsync(file.fileno())
    return size, crc


def _bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def checksum(path: Path) -> tuple[int, int]:
    """Return a file's (bytes, CRC-32)."""
    crc = size = 0
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            crc, size = zlib.crc32(piece, crc), size + len(piece)
    return size, crc


# -- reading ---------------------------------------------------------------------------------------


@dataclass
class Reader:
    """Reads boxes of stored tensors; the files it has opened stay open until it is closed."""

    stack: ExitStack = field(default_factory=ExitStack)
    files: dict[Path, Any] = field(default_factory=dict)

    def open(self, path: Path) -> Any:
        """Return an open file. Raises CheckpointError where it is no safetensors file."""
        if path not in self.files:
            try:
                self.files[path] = self.stack.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise CheckpointError(
                    f"{path} must be a safetensors file, but it cannot be read: {error}; "
                    "load another one"
                ) from error
        return self.files[path]

    def outlines(self, path: Path) -> dict[str, Outline]:
        """Return what a file holds by name. Raises CheckpointError for a dtype that torch lacks."""
        handle = self.open(path)
        found: dict[str, Outline] = {}
        for key in handle.keys():  # noqa: SIM118  # not a dict
            box = handle.get_slice(key)
            dtype = DTYPES.get(box.get_dtype())
            if dtype is None:
                raise CheckpointError(
                    f"weights must have a dtype of torch, but {key!r} of {path} is "
                    f"{box.get_dtype()}; convert it"
                )
            found[key] = Outline(key, dtype, tuple(box.get_shape()))
        return found

    def read(self, stored: Stored, start: Sequence[int], out: Tensor) -> None:
        """Fill ``out`` with the box of a stored tensor that begins at ``start``, converting its
        dtype where that differs. Raises CheckpointError where it may not be (``convertible``)."""
        if not convertible(stored.dtype, out.dtype) or len(stored.shape) != out.dim():
            raise CheckpointError(
                f"values must stay what they are, but {stored.keys} is {stored.dtype} with "
                f"{len(stored.shape)} dims, and {out.dtype} with {out.dim()} is wanted; build the "
                "model that was saved, or convert the file"
            )
        found = 0
        for piece in stored.pieces:
            low = [max(a, b) for a, b in zip(start, piece.start, strict=True)]
            high = [
                min(a + n, b + m)
                for a, n, b, m in zip(start, out.shape, piece.start, piece.size, strict=True)
            ]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            part, target = self._box(piece, low, high), out
            for dim, (a, b) in enumerate(zip(low, high, strict=True)):
                target = target.narrow(dim, a - start[dim], b - a)
            target.copy_(part)
            found += part.numel()
        if found != out.numel():
            raise CheckpointError(
                f"the pieces of a tensor must cover it once, but those of {stored.keys} give {found} of "
                f"{out.numel()} elements; load another checkpoint"
            )

    def whole(self, stored: Stored) -> Tensor:
        """Return a stored tensor whole, on the CPU."""
        out = torch.empty(stored.shape, dtype=stored.dtype)
        self.read(stored, (0,) * len(stored.shape), out)
        return out

    def _box(self, piece: Piece, low: Sequence[int], high: Sequence[int]) -> Tensor:
        file = self.open(piece.file)
        try:
            if not piece.size:
                return file.get_tensor(piece.key)
            cuts = tuple(
                slice(a - first, b - first)
                for a, b, first in zip(low, high, piece.start, strict=True)
            )
            box = file.get_slice(piece.key)
            if tuple(box.get_shape()) == piece.size:
                return box[cuts]
            return file.get_tensor(piece.key).view(piece.size)[cuts]
        except SafetensorError as error:
            raise CheckpointError(
                f"{piece.file} must hold {piece.key!r} as its manifest says, but it does not "
                f"({error}); load another checkpoint"
            ) from error


def convertible(saved: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether values may be converted: among floating dtypes, as the precision of a plan asks for."""
    return saved == wanted or (saved.is_floating_point and wanted.is_floating_point)


@contextmanager
def reading() -> Iterator[Reader]:
    """Give a reader and close its files afterwards."""
    reader = Reader()
    with reader.stack:
        yield reader


def contents(reader: Reader, path: Path) -> dict[str, Stored]:
    """Return everything that a safetensors file, or a folder of them, holds by name."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    found: dict[str, Stored] = {}
    for file in files:
        for key, outline in reader.outlines(file).items():
            shape = outline.shape
            pieces = (Piece(file, key, (0,) * len(shape), shape),)
            found[key] = Stored(outline.dtype, shape, pieces)
    if not found:
        raise CheckpointError(f"{path} must hold weights, but no tensor is there; name another")
    return found
