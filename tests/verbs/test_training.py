"""What ranks tell of their steps, and what becomes of it."""

from __future__ import annotations

import contextlib
import io
import json
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from shardwright.cli import app
from shardwright.console import Terminal, show_training
from shardwright.core.costs import CostTable
from shardwright.core.plan import Frontier
from shardwright.errors import InputError
from shardwright.files.clusterfile import read_cluster
from shardwright.files.planfile import Origin, write_plan
from shardwright.planner.search import Limits, as_strategy, survey
from shardwright.planner.space import Seed
from shardwright.runtime.forecast import Forecast
from shardwright.runtime.train import LoopEnd, Step
from shardwright.verbs.events import Events, following, read_events
from shardwright.verbs.request import Job, Request, Watch
from shardwright.verbs.results import ForecastError, TrainingRun
from shardwright.verbs.subject import capture
from shardwright.verbs.training import _event, _outcome, start
from tests.processes import wait_until
from tests.runtime.world import run_ranks
from tests.verbs.test_hosts import HOSTS
from tests.verbs.test_trials import MODEL

pytestmark = pytest.mark.torch


def test_a_forecast_goes_from_a_step_into_the_run() -> None:
    seen = Forecast(
        number=5, steps=(1, 0), predicted=(3.0, float("nan")), stale=(4.0, float("nan")), weights=(7, 0)
    )  # fmt: skip
    steps = [Step(number=one, loss=1.0, seconds=0.1) for one in (6, 7)]
    steps.append(Step(number=8, loss=1.0, seconds=0.1, forecast=seen))
    events = [json.loads(json.dumps(_event(step, None) | {"tokens": 0.0})) for step in steps]
    end = LoopEnd(first_step=5, checkpoint="", is_complete=True)
    run = _outcome(end, [end], events).run
    assert run.forecasts == (ForecastError(step=5, predicted=3.0, stale=4.0),)


def test_a_signal_that_came_to_one_rank_alone_ended_the_run() -> None:
    first = LoopEnd(first_step=0, checkpoint="", is_complete=False)
    ends = [first, replace(first, signal=signal.SIGTERM)]
    assert _outcome(first, ends, []).run.signal == signal.SIGTERM
    assert _outcome(first, ends[:1], []).run.signal == 0


def test_lines_of_ranks_are_read_once_and_whole(tmp_path: Path) -> None:
    """Of a long run the lines would be read again in every look; here that shows as they are no lines any more."""
    events, seen = tmp_path / "events", list[dict[str, float]]()
    with following(tmp_path, Watch(step=seen.append)):
        events.write_text('{"step": 1}\n{"step"')
        assert wait_until(lambda: len(seen) == 1)
        with events.open("r+") as file:
            file.write("? no more ?")
            file.seek(0, 2)
            file.write(": 2}\n")
        assert wait_until(lambda: len(seen) == 2)
    assert seen == [{"step": 1}, {"step": 2}]
    assert read_events(tmp_path / "none") == []


def test_a_run_that_resumes_where_no_step_is_left_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = TrainingRun(losses=(), first_step=4, step_seconds=0.0, tokens_per_second=0.0)
    show_training(Terminal(), run, Job(model="m", steps=2, checkpoint_dir="kept"))
    assert "No step was left: training is at step 4 of 2; --steps asks" in capsys.readouterr().out


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


def on_a_rank(folder: str, *commands: tuple[str, ...]) -> list[tuple[str, str]]:
    """Give commands as every rank of torchrun gives them; return what each printed, and the folders left."""
    said = list[tuple[str, str]]()
    with contextlib.chdir(folder):
        for words in commands:
            with contextlib.redirect_stdout(io.StringIO()) as out:
                app(list(words), standalone_mode=False)
            said.append((words[0], out.getvalue()))
    return said


@pytest.mark.ranks
@pytest.mark.timeout(200)
def test_under_torchrun_a_plan_of_hosts_is_run_and_compared_and_rank_0_speaks(
    tmp_path: Path,
) -> None:
    (tmp_path / "net.py").write_text(MODEL)
    where, model = read_cluster(HOSTS.format(count=2, devices=1)), f"{tmp_path}/net.py:build"
    graph = capture(model, global_batch=8, precision="float32").graph
    searched = survey(graph, where, CostTable(), limits=Limits(max_candidates=2)).settled()
    plan = searched.plan(as_strategy(searched.context, Seed(data=2)))
    write_plan(tmp_path / "plan.json", Frontier(plans=(plan,)), origin=Origin(), cluster=where)
    run = ("run", "plan.json", model, "--json", "-n", "6", "--checkpoint-dir", "kept")
    more = ("run", "plan.json", model, "--json", "-n", "9", "--checkpoint-dir", "kept", "--resume")
    seen = ("compare", "plan.json", model, "--json", "-n", "4", "--trace", "trace.json")
    first, second = run_ranks(2, on_a_rank, str(tmp_path), run, more, seen, timeout=100)
    assert [text for _, text in second] == ["", "", ""]
    trained, resumed, compared = (json.loads(text) for _, text in first)
    assert (trained["first_step"], len(trained["losses"]), trained["complete"]) == (0, 6, True)
    assert (resumed["first_step"], len(resumed["losses"])) == (6, 3)
    alone = start(plan, Origin(), Job(model=model, steps=9), Watch()).run  # on this machine
    assert trained["losses"] + resumed["losses"] == list(alone.losses)
    rows = {row["name"]: row for row in compared["rows"]}
    assert rows["step time"]["measured"] > 0.0
    assert (tmp_path / "trace.json").is_file()


def test_the_file_of_events_is_named_where_its_disk_is_full(tmp_path: Path) -> None:
    with Events(tmp_path) as events:
        events.tell({"step": 1})
    assert read_events(tmp_path / "events") == [{"step": 1}]
    (tmp_path / "events").unlink()
    (tmp_path / "events").symlink_to("/dev/full")
    with Events(tmp_path) as events, pytest.raises(OSError, match="No space left") as caught:
        events.tell({"step": 1})
    assert caught.value.filename == str(tmp_path / "events")
