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
        ("", r"part: this key is needed; add it"),
        (PART, r"part\[0\].devices: this key is needed; add it"),
        (PART + "devices = [0, 0]", r"devices \[0, 0\] name one twice; name each once"),
        (PART + "devices = [0, 1, 2]\ntensor = 2", "the number of devices, 3, not 2; change"),
        (PART + "devices = [0]\nzero = 4", r"part\[0\].zero: .* equal to 3, not 4; give a number"),
        (PART + "devices = [-1]", r"part\[0\].devices\[0\]: .* equal to 0, not -1; give a number"),
        (PART + "devices = [0]\nzer = 1", r"unknown key 'part\[0\].zer'; .*zero"),
        (PART + "devices = [0]\nsequence = 1", "boolean, not 1; write true or false"),
        ("part = 1", "list, not 1; write a list"),
        ('schedule = "zb"\n' + PART + "devices = [0]", "'1f1b', 'gpipe'.*, not 'zb'; choose"),
        ('schedule = "gpipe"\norder = ["0F0 0B0"]\n' + PART + "devices = [0]", "both given; leave"),
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
