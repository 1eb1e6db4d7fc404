"""Order files: what people write, and what torch writes."""

from pathlib import Path

import pytest

from shardwright.errors import InputError
from shardwright.files.orderfile import read_order


def test_rows_may_be_parted_by_spaces_or_commas(tmp_path: Path) -> None:
    path = tmp_path / "order.csv"
    path.write_text("# first worker\n0F0,0F1,,0B0,0B1\n\n1F0 1I0\t1W0 # and so on\n")
    assert read_order(path) == (str(path), ("0F0 0F1 0B0 0B1", "1F0 1I0 1W0"), (2, 4), 2)


def test_a_file_without_actions_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "order.csv"
    path.write_text("# nothing\n")
    with pytest.raises(InputError, match="write a row for every worker"):
        read_order(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("# one\n0F0 0B0\n1F0 1F4096 1B0", r"line 3: .* at most 4,096 microbatches.* microbatch 4,096; "),
        ("0F0 0B0\n" * 1_000_000, r"line 1025: .* at most 1,024 rows.* there are 1,000,000; write all"),
    ],
)  # fmt: skip
def test_what_is_beyond_a_limit_is_refused_by_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "order.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=said):
        read_order(path)
