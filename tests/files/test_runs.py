"""Files of published runs: what is read, and what is said of a wrong one."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwright.errors import InputError
from shardwright.files.runs import parse_runs, read_runs

HEADER = "id,source_id,model,layers,hidden,heads,seq,gpu,gpus,tp,iter_s,notes\n"
ROW = "a,s,M,2,64,4,128,A100-80,8,2,0.5,\n"


def test_a_blank_cell_is_not_published_and_never_zero() -> None:
    run = parse_runs(HEADER + "a,s,M,2,64,4,128,A100-80,8,,,\n")[0]
    assert (run.tp, run.iter_s, run.peak_mem_gib, run.notes) == (None, None, None, "")
    assert (run.layers, run.gpus, run.row) == (2, 8, 2)


def test_quoted_cells_hold_commas_and_unknown_columns_are_passed_over() -> None:
    text = HEADER.replace("notes", "weather,notes") + 'a,s,M,2,64,4,128,H100,8,2,0.5,dry,"x, y"\n'
    assert parse_runs(text)[0].notes == "x, y"


def test_whole_numbers_may_be_written_with_a_point() -> None:
    assert parse_runs(HEADER + ROW.replace(",2,64", ",2.0,64"))[0].layers == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        (HEADER, "no runs"),
        ("id,model\na,b\n", "row 1: the columns source_id, layers.* are missing"),
        (HEADER.replace("tp", "seq") + ROW, "row 1: the column 'seq' appears twice"),
        (HEADER + ROW + ROW, "row 3, column id: 'a' is also the run of row 2"),
        (HEADER + ROW.replace("64", "many"), "row 2, column hidden: must be a whole number"),
        (
            HEADER + ROW.replace(",2,64", ",9999,64"),
            "column layers: .* 2,048 layers .* not of 9,999",
        ),
        (HEADER + ROW.replace("64", "6.5"), "row 2, column hidden: must be a whole number"),
        (HEADER + ROW.replace("64", "1e12"), "must be a whole number from 1 to 262,144"),
        (HEADER + ROW.replace("0.5", "0"), "row 2, column iter_s: must be a number above 0"),
        (HEADER + ROW.replace("0.5", "inf"), "row 2, column iter_s: .*not 'inf'"),
        (HEADER + ROW.replace("0.5", "nan"), "row 2, column iter_s: .*not 'nan'"),
        (HEADER + ROW.replace(",64", ","), "row 2, column hidden: is blank"),
        (HEADER + ROW.replace("0.5,", "0.5,x,y,z"), "row 2: has 2 cells more"),
        (HEADER + ROW + '"b,s\n', "row 3: no table"),
    ],
)
def test_a_wrong_file_is_refused_with_its_place(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_runs(text)


def test_a_file_that_is_absent_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read .*absent\.csv"):
        read_runs(tmp_path / "absent.csv")
    (tmp_path / "picture").write_bytes(b"\x89PNG\xff\xfe")
    with pytest.raises(InputError, match="is text in UTF-8"):
        read_runs(tmp_path / "picture")


def test_what_people_write_into_empty_cells_is_blank() -> None:
    for text in ("-", "n/a", "N/A", "unknown"):
        (run,) = parse_runs(HEADER + ROW.replace("0.5", text), "runs")
        assert run.iter_s is None, text
