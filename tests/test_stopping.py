"""Planning that is stopped, by Ctrl-C or by its seconds: whatever the method, the answer is the best so far."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from shardwright import api
from shardwright.core.costs import CostTable
from shardwright.core.plan import Frontier
from shardwright.files.planfile import read_plan
from shardwright.verbs.study import _Solver
from tests import zoo
from tests.command import MODEL, shardwright

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("short_climbs")]

# Ctrl-C comes once while the model is captured: when its forward is traced.
STOPPING = (
    MODEL
    + """
import os, signal
sent = []

class Stopping(Net):
    def forward(self, x, y):
        if not sent:
            sent.append(os.kill(os.getpid(), signal.SIGINT))
            print("went on")
        return super().forward(x, y)

def stopping():
    return Stopping()
"""
)
METHODS = {
    "exact": (),
    "mcmc": ("--method", "mcmc"),
    "min-devices": ("--mode", "min-devices"),
    "min-money": ("--mode", "min-money"),
    "curve": ("--mode", "curve"),
    "deadline": ("--deadline", "10 s"),
    "staleness": ("--allow-staleness", "3"),
    "compression": ("--allow-compression",),
    "spacing": ("--spacing", "0.01"),
    "named": ("--seed-plan", "megatron:2x2"),
}
PRICED = """
[kind.gpu]
peak = { float32 = "10 TFLOP/s" }
memory = "16 GiB"
memory_bandwidth = "900 GB/s"
[[host]]
kind = "gpu"
devices = 4
link = "50 GB/s"
price = "4 USD/h"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(STOPPING)
    (tmp_path / "cluster.toml").write_text(PRICED)
    return tmp_path


@pytest.mark.parametrize("words", METHODS.values(), ids=METHODS)
def test_ctrl_c_gives_the_best_so_far_whatever_the_method(
    words: tuple[str, ...], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    solve = _Solver.__call__

    def interrupted(solver: _Solver, costs: CostTable) -> Frontier:
        os.kill(os.getpid(), signal.SIGINT)  # as the search begins
        return solve(solver, costs)

    monkeypatch.setattr(_Solver, "__call__", interrupted)
    plan = ("plan", "net.py:build", "-c", "cluster.toml", "-b", "8", *words, "--json")
    done = shardwright(*plan, folder=folder)
    assert done.returncode == 0, done.stderr
    assert "stopping at the next safe point; Ctrl-C again stops at once" in done.stderr
    assert "Traceback" not in done.stderr
    assert json.loads(done.stdout)["complete"] is False
    assert read_plan(folder / "plan.json")


@pytest.mark.parametrize("words", METHODS.values(), ids=METHODS)
def test_seconds_bound_every_method(words: tuple[str, ...], folder: Path) -> None:
    plan = ("plan", "net.py:build", "-c", "cluster.toml", "-b", "8", *words)
    done = shardwright(*plan, "--seconds", "1e-3", "--json", folder=folder)
    assert done.returncode == 0, done.stderr
    assert read_plan(folder / "plan.json")


@pytest.mark.parametrize("mode", ["min-time", "min-devices", "curve"])
def test_a_search_may_be_stopped_whenever_it_asks(mode: str) -> None:
    module, batch = zoo.mlp()
    asked = 0

    def planned(last: int) -> Frontier:
        nonlocal asked
        asked = 0

        def stop() -> bool:
            nonlocal asked
            asked += 1
            return asked > last

        request = api.Request(mode=mode, precision="float64", measure="never")
        watch = api.Watch(stop=stop)
        return api.study(module, "1x2xV100", request, watch, batch=batch).frontier

    def fastest(found: Frontier) -> float:
        """Before ties go to the simplest, which may be another the more is found."""
        return min(plan.predicted.step_seconds for plan in found.plans)

    best = fastest(planned(10**9))
    whole, seconds = asked, list[float]()
    for last in (0, whole // 3):
        found = planned(last)
        seconds.append(fastest(found))
        assert last or found.best.bound is None
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] >= best * (1 - 1e-9)


@pytest.mark.parametrize(
    "words", [("capture",), ("plan", "-c", "cluster.toml", "-b", "8")], ids=" ".join
)
def test_ctrl_c_where_there_is_no_answer_so_far_ends_at_once_with_one_line(
    words: tuple[str, ...], folder: Path
) -> None:
    done = shardwright(*words, "net.py:stopping", folder=folder)
    assert (done.returncode, done.stderr.count("\n"), done.stdout) == (130, 1, "")
    assert done.stderr.startswith("interrupted")
