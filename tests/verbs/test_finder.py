"""The finder, tried on rules that it is not shown, and on what it must not find."""

from __future__ import annotations

import pytest

from shardwright.errors import InputError
from shardwright.verbs.examples.notation import F, call
from shardwright.verbs.finder import find_rules, propose
from tests.verbs.found import found_again

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    "kind",
    [
        "aten.mm.default",
        "aten.bmm.default",
        "aten.linear.default",
        "aten.relu.default",
        "aten.gelu.default",
        "aten.softmax.int",
        "aten.sum.dim_IntList",
        "aten.mean.default",
        "aten.layer_norm.default",
        "aten.transpose.int",
        "aten.dot.default",
        "aten.cumsum.default",
        "aten.cdist.default",
        "aten.mse_loss.default",
        "aten.amax.default",
        "aten.gru.input",
        "aten.addmv.default",
    ],
)
def test_a_known_rule_is_found_again(kind: str) -> None:
    found = found_again(kind)
    assert found.again == found.known > 0
    assert found.proposal.num_splits > 5


def test_a_bias_is_found_to_count_once_and_a_mean_to_be_scaled() -> None:
    (line,) = found_again("aten.linear.default").proposal.lines
    assert "+bias" in line
    line = found_again("aten.mean.default").proposal.lines[0]
    assert 'mean="k0' in line


@pytest.mark.parametrize(
    ("kind", "example"),
    [
        ("aten.sort.default", call(F(6), 0)),
        ("aten.any.default", call(F(4, 6))),
        ("aten.std.default", call(F(4, 6))),
        ("aten.randn.default", call([4, 6])),
        ("aten.histc.default", call(F(12), 4)),
    ],
)
def test_nothing_is_found_where_no_cut_is_right(kind: str, example: object) -> None:
    assert propose(kind, (example,)).lines == ()  # type: ignore[arg-type]


def test_what_depends_on_arguments_is_told_in_several_lines() -> None:
    assert len(found_again("aten.softmax.int").proposal.lines) == 2


def test_a_view_that_merges_dims_is_beyond_the_notation() -> None:
    found = found_again("aten.flatten.using_ints")
    assert found.again < found.known
    assert "dims are merged or cut" in found.reasons


def test_a_kind_that_nobody_shows_is_refused_with_the_two_ways_to_show_it() -> None:
    with pytest.raises(InputError, match=r"--model.*or add an example"):
        find_rules(["aten.vander.default"])
    with pytest.raises(InputError, match="torch has no operator"):
        propose("aten.no_such_thing.default", (call(F(4)),))
