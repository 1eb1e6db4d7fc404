"""The rules on the operators of real models, with the arguments that capture gives them."""

from __future__ import annotations

from typing import Any

import pytest

from shardwright.operators.splitting import has_rule, iterate
from shardwright.runtime.rules import example_of
from shardwright.verbs.rules import check_kind
from tests import zoo
from tests.runtime.equivalence import captured_of

pytestmark = pytest.mark.torch

MODELS = (zoo.cnn, zoo.lstm_translation, zoo.llama, zoo.t5, zoo.vit)


@pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)
def test_every_operator_of_a_model_in_pieces_equals_it_whole(build: Any) -> None:
    captured = captured_of(build)[2]
    seen: dict[str, bool] = {}
    for index, operator in enumerate(captured.graph.operators):
        assert has_rule(operator.kind)
        example = example_of(captured, index)
        key = f"{operator.kind}{example}"
        if key not in seen:
            found = check_kind(operator.kind, (example,), cases=0)
            assert not found.problem, found.problem
            seen[key] = bool(iterate(captured.graph, index).dims)
    assert sum(seen.values()) > len(seen) / 2
