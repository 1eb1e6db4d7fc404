"""What ranks tell of their steps, and what becomes of it."""

from __future__ import annotations

import json

import pytest

from shardwright.core.costs import CostTable
from shardwright.errors import InputError
from shardwright.files.planfile import Origin
from shardwright.planner.search import search
from shardwright.runtime.forecast import Forecast
from shardwright.runtime.train import LoopEnd, Step
from shardwright.verbs.request import Job, Request, Watch
from shardwright.verbs.results import ForecastError
from shardwright.verbs.training import _event, _outcome, start
from tests.planner.search.models import cluster, mlp

pytestmark = pytest.mark.torch


def test_a_forecast_goes_from_a_step_into_the_run() -> None:
    seen = Forecast(
        number=5, steps=(1, 0), predicted=(3.0, float("nan")), stale=(4.0, float("nan")), weights=(7, 0)
    )  # fmt: skip
    steps = [Step(number=one, loss=1.0, seconds=0.1) for one in (6, 7)]
    steps.append(Step(number=8, loss=1.0, seconds=0.1, forecast=seen))
    events = [json.loads(json.dumps(_event(step, None) | {"tokens": 0.0})) for step in steps]
    end = LoopEnd(first_step=5, checkpoint="", is_complete=True)
    run = _outcome([end], events).run
    assert run.forecasts == (ForecastError(step=5, predicted=3.0, stale=4.0),)


def test_lateness_is_allowed_to_a_search_only() -> None:
    with pytest.raises(InputError, match="--allow-staleness"):
        Request(staleness=3, seed_plan="stash")
    with pytest.raises(InputError, match="--allow-staleness"):
        Request(staleness=3, method="mcmc")
    wire = {"gradient_dtype": "bfloat16", "error_feedback": True}
    for other in ({"precision": "float16"}, {"compressor": "int8"}, wire):
        with pytest.raises(InputError, match=r"whole gradients.* or --allow-staleness"):
            Request(staleness=3, **other)


def test_error_feedback_is_refused_where_the_loss_is_scaled() -> None:
    with pytest.raises(InputError, match="the precision is float16; plan for bfloat16"):
        Request(precision="float16", gradient_dtype="bfloat16", error_feedback=True)


def test_a_run_in_every_rank_of_torchrun_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = mlp()
    plan = search(graph, cluster(1, 2), CostTable(), seed_plan="megatron:2x1").best
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        InputError, match="torchrun has started 2 of this command; leave torchrun out"
    ):
        start(plan, Origin(), Job(model="net.py:build"), Watch())
