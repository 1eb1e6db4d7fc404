"""Parts files: what they may hold, and what a complaint says."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwright.errors import InputError
from shardwright.files.partsfile import read_parts

PART = '[[part]]\nmodules = ["a"]\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"part: Field required; the keys are part, num_microbatches"),
        (PART, r"part.0.devices: Field required"),
        (PART + "devices = [0, 0]", "a device is named twice"),
        (PART + "devices = [0, 1, 2]\ntensor = 2", "must be the number of devices, 3, not 2"),
        (PART + "devices = [0]\nzero = 4", "part.0.zero: Input should be less than or equal to 3"),
        (PART + "devices = [-1]", "part.0.devices.0"),
        (PART + "devices = [0]\ncolour = 1", "part.0.colour: Extra inputs .* the keys are"),
        ('schedule = "zb"\n' + PART + "devices = [0]", "schedule: Input should be '1f1b', 'gpipe'"),
        ('schedule = "gpipe"\norder = ["0F0 0B0"]\n' + PART + "devices = [0]", "both given"),
        ("part = ", "not valid TOML"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "parts.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        read_parts(path)


def test_a_missing_file_is_one_message(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read"):
        read_parts(tmp_path / "none.toml")


def test_what_is_left_of_the_devices_is_data_parallel(tmp_path: Path) -> None:
    path = tmp_path / "parts.toml"
    path.write_text(PART + "devices = [4, 5, 6, 7]\ntensor = 2")
    (part,) = read_parts(path).part
    assert (part.data_degree, part.tensor) == (2, 2)
