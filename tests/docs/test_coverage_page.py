"""The committed page of architectures is whole and says what the registry of names knows."""

import re

import pytest

from shardwright.runtime.capture.tasks import FAMILIES, KNOWN_CONFIGS
from tests.docs.pages import ROOT

pytestmark = pytest.mark.torch

PAGE = (ROOT / "docs" / "reference" / "coverage.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("| ").split(" | ")]
    for line in PAGE.splitlines()
    if line.startswith("| `hf:")
]
COLUMNS = 11
FEWEST = 20  # architectures captured whole, with less than this share that cannot be split:
LARGEST_SHARE = 5.0


def test_every_architecture_with_a_name_has_a_line() -> None:
    names = [row[0].strip("`").removeprefix("hf:") for row in ROWS]
    for pending in re.findall(r"^Not measured yet: (.*)$", PAGE, flags=re.MULTILINE):
        names += re.findall(r"`hf:([^`]+)`", pending)
    kinds = {KNOWN_CONFIGS[name]["model_type"] for name in names}
    assert kinds == {fields["model_type"] for fields in KNOWN_CONFIGS.values()}
    assert len(names) == len(kinds)


def test_every_name_and_every_family_is_listed() -> None:
    assert set(re.findall(r"`hf:([^`]+)`", PAGE.split("Names:", 1)[1])) >= set(KNOWN_CONFIGS)
    for family in FAMILIES:
        assert f"### {family[0].upper()}{family[1:]}\n" in PAGE


def test_lines_are_well_formed() -> None:
    for row in ROWS:
        assert len(row) == COLUMNS, row
        _, parameters, _, operators, with_rule, share, mixed, seconds, *_ = row
        assert re.fullmatch(r"[\d,]+ M", parameters), row
        assert int(with_rule.replace(",", "")) <= int(operators.replace(",", "")), row
        assert re.fullmatch(r"(more than )?\d+\.\d\d%", share), row
        assert re.fullmatch(r"\d+\.\d%|-", mixed), row
        assert re.fullmatch(r"\d+\.\d s", seconds), row


def test_every_trial_equals_one_process() -> None:
    for row in ROWS:
        for cell in row[-3:]:
            assert cell.startswith("equal to "), row


def test_enough_architectures_are_covered() -> None:
    covered = [row for row in ROWS if row[2] == "whole" and float(row[5][:-1]) < LARGEST_SHARE]
    assert len(covered) >= FEWEST


def test_the_page_says_where_it_was_measured() -> None:
    for word in ("Python 3.", "torch ", "transformers ", "thread"):
        assert word in PAGE
