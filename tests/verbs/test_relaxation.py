"""Where nothing fits, every change that is named really helps, and a smaller one does not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardwright import api
from shardwright.errors import NoPlan
from tests.test_cli import MODEL

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.usefixtures("short_climbs")]
WIDE = MODEL.replace("16, 32", "16, 512").replace("32, 8", "512, 8")


def refusal(model: str, **wish: object) -> NoPlan:
    with pytest.raises(NoPlan) as refused:
        api.plan(model, "2x1xV100", **{"global_batch": 32, "precision": "float32"} | wish)  # type: ignore[arg-type]
    return refused.value


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "wide.py").write_text(WIDE)
    return f"{tmp_path / 'wide.py'}:build"


def test_every_named_change_of_memory_and_batch_is_one_under_which_planning_succeeds(
    model: str,
) -> None:
    limit = "90 KiB"
    refused = refusal(model, memory_limit=limit)
    found = {one.option.split(" ")[0]: one for one in refused.relaxations}
    assert "--memory-limit" in found
    for name, one in found.items():
        value = re.sub(r'^--\S+ "?|"$', "", one.option)
        wish: dict[str, object] = {"memory_limit": limit, "precision": "float32"}
        wish |= {"global_batch": 32}
        if name == "--memory-limit":
            wish["memory_limit"] = value
        elif name in ("--optimizer", "--precision"):
            wish[name.removeprefix("--")] = value
        elif name == "--global-batch":
            wish["global_batch"] = int(value)
        else:
            continue
        plan = api.plan(model, "2x1xV100", **wish).best  # type: ignore[arg-type]
        assert plan.predicted.peak_bytes <= one.peak_bytes * 1.001 or name != "--memory-limit"
    assert any("such devices instead of 2" in one.what for one in refused.relaxations)
    assert "any one of these helps" in str(refused)


def test_a_missed_deadline_is_answered_with_the_step_that_can_be_had(model: str) -> None:
    refused = refusal(model, deadline="1 us", global_batch=2)
    assert "must end within 1e-06 s" in refused.problem
    first = refused.relaxations[0]
    assert first.option.startswith("--deadline")
    fastest = api.plan(model, "2x1xV100", global_batch=2, precision="float32").best
    assert first.step_seconds == pytest.approx(fastest.predicted.step_seconds)


def test_a_named_strategy_that_is_too_large_is_answered_with_the_free_search(model: str) -> None:
    refused = refusal(model, seed_plan="megatron:2x1", memory_limit="150 KiB")
    assert any(one.option == "without --seed-plan" for one in refused.relaxations)


def test_what_stops_microbatches_is_named_with_its_place(tmp_path: Path) -> None:
    mixing = WIDE.replace("self.up(x)", "self.up(x).cumsum(0)")
    assert mixing != WIDE
    (tmp_path / "mixing.py").write_text(mixing)
    with pytest.raises(NoPlan) as refused:
        api.plan(
            f"{tmp_path / 'mixing.py'}:build", "1x1xV100", global_batch=4, memory_limit="8 KiB"
        )
    assert "this model allows only one" in str(refused.value)
    assert "(aten.cumsum.default) mixes samples of the batch" in str(refused.value)
    assert "let it run along another" in str(refused.value)


def test_statistics_of_the_whole_batch_are_answered_with_those_of_microbatches(
    tmp_path: Path,
) -> None:
    normed = WIDE.replace("self.up(x)", "self.norm(self.up(x))")
    normed = normed.replace(".__init__()", ".__init__()\n        self.norm = nn.BatchNorm1d(512)")
    (tmp_path / "normed.py").write_text(normed)
    wish = {"global_batch": 256, "precision": "float32", "batch_norm": "synchronised"}

    def refused(limit: str) -> NoPlan:
        with pytest.raises(NoPlan) as caught:
            api.plan(f"{tmp_path / 'normed.py'}:build", "1x1xV100", memory_limit=limit, **wish)  # type: ignore[arg-type]
        return caught.value

    first = next(one for one in refused("90 KiB").relaxations if "--memory" in one.option)
    found = refused(f"{int(first.peak_bytes * 0.8 / 1024)} KiB")
    assert "--batch-norm local" in [one.option for one in found.relaxations]
    assert "--batch-norm local takes that of a microbatch" in str(found)
