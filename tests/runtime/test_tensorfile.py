"""Our safetensors files are everyone's, and any box of a tensor is read from any pieces of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from shardwright.errors import CheckpointError
from shardwright.runtime.tensorfile import (
    CODES,
    Outline,
    Piece,
    Stored,
    checksum,
    in_file_order,
    reading,
    write,
)

pytestmark = pytest.mark.torch


def write_all(path: Path, tensors: dict[str, Tensor]) -> tuple[int, int]:
    outlines = in_file_order(Outline(n, t.dtype, tuple(t.shape)) for n, t in tensors.items())
    return write(path, outlines, (tensors[one.name] for one in outlines))


def test_the_library_reads_every_dtype_and_shape_that_we_write(tmp_path: Path) -> None:
    tensors: dict[str, Tensor] = {"empty": torch.zeros(0, 3), "number": torch.tensor(7.0)}
    for dtype in CODES:
        tensors[f"of {dtype}"] = (torch.arange(15).reshape(3, 5) % 2).to(dtype)
    tensors["turned"] = torch.randn(4, 6).t()
    written = write_all(tmp_path / "all.safetensors", tensors)
    found = load_file(tmp_path / "all.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].to(torch.complex64), tensor.to(torch.complex64)), name
    assert written == checksum(tmp_path / "all.safetensors")


def test_a_dtype_that_the_format_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'z' is torch\.complex128"):
        write_all(tmp_path / "x", {"z": torch.zeros(2, dtype=torch.complex128)})


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_any_box_is_read_from_any_pieces(tmp_path: Path, data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), max_size=3))
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
    boxes = [((0,) * len(shape), tuple(shape))]
    for dim in range(len(shape)):  # cut every box in two along the dim, or not
        cut: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        for start, size in boxes:
            first = data.draw(st.integers(1, size[dim]))
            for begin, length in ((0, first), (first, size[dim] - first)):
                if length:
                    cut.append(
                        (
                            (*start[:dim], start[dim] + begin, *start[dim + 1 :]),
                            (*size[:dim], length, *size[dim + 1 :]),
                        )
                    )
        boxes = cut
    pieces: list[Piece] = []
    for number, (start, size) in enumerate(boxes):
        file = tmp_path / f"{number}.safetensors"
        write_all(file, {"t": box(whole, start, size)})
        pieces.append(Piece(file, "t", start, size))
    start = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    size = tuple(data.draw(st.integers(1, n - a)) for n, a in zip(shape, start, strict=True))
    out = torch.full(size, -1, dtype=torch.float64)
    with reading() as reader:
        reader.read(Stored(whole.dtype, tuple(shape), tuple(pieces)), start, out)
        assert torch.equal(out, box(whole, start, size).double())
        if len(pieces) > 1:
            part = Stored(whole.dtype, tuple(shape), tuple(pieces[1:]))
            with pytest.raises(CheckpointError, match="must cover it once"):
                reader.whole(part)


@pytest.mark.parametrize("wanted", [torch.float32, torch.int64, torch.bool])
def test_a_conversion_that_changes_what_values_are_is_refused(
    tmp_path: Path, wanted: torch.dtype
) -> None:
    write_all(tmp_path / "x", {"t": torch.ones(3, dtype=torch.complex64)})
    stored = Stored(torch.complex64, (3,), (Piece(tmp_path / "x", "t", (0,), (3,)),))
    with reading() as reader, pytest.raises(CheckpointError, match="must stay what they are"):
        reader.read(stored, (0,), torch.zeros(3, dtype=wanted))


def box(whole: Tensor, start: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
    for dim, (begin, length) in enumerate(zip(start, size, strict=True)):
        whole = whole.narrow(dim, begin, length)
    return whole
