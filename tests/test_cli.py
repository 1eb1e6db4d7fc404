"""The command line: fast help, exit codes, one clear message, stable JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardwright.cli import app

COMMANDS = (
    "doctor",
    "init",
    "capture",
    "profile",
    "plan",
    "simulate",
    "explain",
    "run",
    "compare",
    "verify",
    "report",
    "export",
    "iopddl",
)
MODEL = """
import torch
from torch import nn
import torch.nn.functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 8)

    def forward(self, x, y):
        return F.cross_entropy(self.down(torch.relu(self.up(x))), y)

def build():
    return Net()

def example_batch(batch_size=8):
    return {"x": torch.zeros(batch_size, 16), "y": torch.zeros(batch_size, dtype=torch.int64)}
"""


def shardwright(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in a fresh process, with a store of its own."""
    environment = os.environ | {"SHARDWRIGHT_STORE": str(folder / "records.sqlite")}
    return subprocess.run(
        [sys.executable, "-m", "shardwright.cli", *words],
        capture_output=True, text=True, timeout=300, check=False, cwd=folder, env=environment,
    )  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "net.py").write_text(MODEL)
    return "net.py:build"


@pytest.mark.parametrize("words", [["--help"], *([name, "--help"] for name in COMMANDS)])
def test_help_imports_nothing_heavy(words: list[str]) -> None:
    code = (
        "import sys\n"
        "from shardwright.cli import app\n"
        "try:\n"
        f"    app({words!r})\n"
        "except SystemExit as done:\n"
        "    assert done.code == 0, done.code\n"
        "heavy = {'torch', 'numpy', 'numba', 'plotly', 'transformers', 'highspy'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, shardwright; assert 'torch' not in sys.modules and shardwright.__version__"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_verb_of_the_issue_is_a_command() -> None:
    names = {command.name or command.callback.__name__ for command in app.registered_commands}  # type: ignore[union-attr]
    assert names >= set(COMMANDS)


def test_doctor_speaks_json(tmp_path: Path) -> None:
    done = shardwright("doctor", "--json", folder=tmp_path)
    answer = json.loads(done.stdout)
    assert done.returncode == 0
    assert {check["name"] for check in answer["checks"]} >= {"python", "torch", "memory"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["plan", "none.py:build", "--cluster", "1x2xV100"], "there is no file none.py"),
        (["plan", "hf:gpt2", "--cluster", "nothing"], "neither a TOML file"),
        (["plan", "hf:gpt2", "-c", "1x2xV100", "--memory-limit", "12"], "has no unit"),
        (["plan", "hf:gpt2", "-c", "1x2xV100", "--optimizer", "magic"], "optimizer must be one of"),
        (["simulate", "missing.json"], "cannot read missing.json"),
        (["init", "."], "exists and is kept"),
        (["run", "missing.json", "hf:gpt2", "--resume"], "--checkpoint-dir"),
        (["plan"], "Missing argument"),
        (["plan", "hf:gpt2", "--global-batch", "0"], "greater than or equal to 1"),
        (["frobnicate"], "No such command"),
    ],
)
def test_bad_input_gives_one_message_and_code_two(
    words: list[str], says: str, tmp_path: Path
) -> None:
    done = shardwright(*words, folder=tmp_path)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr.replace("\n", " ")
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.torch
def test_nothing_fits_is_a_negative_answer(model: str, tmp_path: Path) -> None:
    words = ("plan", model, "-c", "1x2xV100", "-b", "8", "--memory-limit", "1 kB")
    done = shardwright(*words, folder=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "error:" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "plan.json").exists()


@pytest.mark.torch
def test_a_plan_can_be_asked_for_by_name(model: str, tmp_path: Path) -> None:
    words = ("plan", model, "-c", "1x4xV100", "-b", "8", "--json", "--seed-plan")
    done = shardwright(*words, "summa", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    (plan,) = json.loads(done.stdout)["plans"]
    assert plan["label"] == "summa 2x2 (2-D tensor parallel)"
    assert "summa 2x2" in (tmp_path / "plan.json").read_text()
    refused = shardwright(*words, "cube", folder=tmp_path)
    assert refused.returncode == 2
    assert "name a grid: cube:IxJxL" in refused.stderr.replace("\n", " ")


@pytest.mark.torch
def test_plan_simulate_explain_and_report_follow_each_other(model: str, tmp_path: Path) -> None:
    planned = shardwright("plan", model, "-c", "1x2xV100", "-b", "8", "--json", folder=tmp_path)
    assert planned.returncode == 0, planned.stderr
    answer = json.loads(planned.stdout)
    assert answer["plans"][answer["chosen"]]["step_seconds"] > 0
    first = (tmp_path / "plan.json").read_bytes()
    shardwright("plan", model, "-c", "1x2xV100", "-b", "8", folder=tmp_path)
    assert (tmp_path / "plan.json").read_bytes() == first

    refused = shardwright("simulate", "plan.json", folder=tmp_path)
    assert refused.returncode == 2
    assert "was made for 'net.py:build'" in refused.stderr

    simulated = shardwright("simulate", "plan.json", model, "--json", folder=tmp_path)
    chosen = answer["plans"][answer["chosen"]]
    assert json.loads(simulated.stdout)["step_seconds"] == pytest.approx(chosen["step_seconds"])

    explained = shardwright("explain", "plan.json", model, folder=tmp_path)
    assert explained.returncode == 0, explained.stderr
    assert "linear" in explained.stdout

    report = shardwright("report", "plan.json", model, "--trace", "t.json.gz", folder=tmp_path)
    assert report.returncode == 0, report.stderr
    assert (tmp_path / "report.html").stat().st_size < 6 * 10**6
    assert (tmp_path / "t.json.gz").exists()
