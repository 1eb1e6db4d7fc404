"""Order files: what people write, and what torch writes."""

from pathlib import Path

import pytest

from shardwright.errors import InputError
from shardwright.files.orderfile import read_order


def test_rows_may_be_parted_by_spaces_or_commas(tmp_path: Path) -> None:
    path = tmp_path / "order.csv"
    path.write_text("# first worker\n0F0,0F1,,0B0,0B1\n\n1F0 1I0\t1W0 # and so on\n")
    assert read_order(path) == (("0F0 0F1 0B0 0B1", "1F0 1I0 1W0"), 2)


def test_a_file_without_actions_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "order.csv"
    path.write_text("# nothing\n")
    with pytest.raises(InputError, match="write a row for every worker"):
        read_order(path)


def test_a_microbatch_beyond_the_limit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "order.csv"
    path.write_text("0F0 0F999999 0B0 0B999999\n")
    with pytest.raises(
        InputError, match=r"at most 4,096 microbatches.* names microbatch 999,999; "
    ):
        read_order(path)
