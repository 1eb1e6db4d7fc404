"""The command line: fast help, exit codes, one clear message, stable JSON."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shardwright.cli import app
from tests.command import MODEL, fresh, shardwright

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("short_climbs")]

COMMANDS = (
    "doctor",
    "init",
    "capture",
    "profile",
    "plan",
    "simulate",
    "explain",
    "diff",
    "why-not",
    "run",
    "compare",
    "verify",
    "report",
    "export",
    "validate",
    "iopddl",
)
# Two choices with two costs each; not both may take most.
CONTEST = {
    "nodes": {
        "intervals": [[0, 2], [1, 3]],
        "costs": [[1, 5], [2, 4]],
        "usages": [[6, 3], [6, 3]],
    },
    "edges": {"nodes": [[0, 1]], "costs": [[0, 0, 9, 1]]},
    "usage_limit": 10,
}
PROFILED = ("plan", "--profile", "graph.txt")


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "net.py").write_text(MODEL)
    return "net.py:build"


def test_help_imports_nothing_heavy() -> None:
    words = [["--help"], *([name, "--help"] for name in COMMANDS)]
    code = (
        "import sys\n"
        "from shardwright.cli import app\n"
        "heavy = {'torch', 'numpy', 'numba', 'plotly', 'transformers', 'highspy', 'shardwright.planner.search'}\n"
        f"for words in {words!r}:\n"
        "    try:\n"
        "        app(words)\n"
        "    except SystemExit as done:\n"
        "        assert done.code == 0, done.code\n"
        "    assert not heavy & set(sys.modules), (words, heavy & set(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage") == len(words)


def test_every_verb_of_the_issue_is_a_command() -> None:
    names = {command.name or command.callback.__name__ for command in app.registered_commands}  # type: ignore[union-attr]
    assert names >= set(COMMANDS)


def test_doctor_speaks_json(tmp_path: Path) -> None:
    done = shardwright("doctor", "--json", folder=tmp_path)
    answer = json.loads(done.stdout)
    assert done.returncode == 0
    assert {check["name"] for check in answer["checks"]} >= {"python", "torch", "memory"}


def test_what_code_of_the_users_prints_is_no_part_of_the_json(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(f"print('imported')\n{MODEL}")
    done = shardwright("capture", "net.py:build", "--json", folder=tmp_path)
    assert isinstance(json.loads(done.stdout), dict)
    assert done.stderr == "imported\n"


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
        (["plan"], "plan needs either a MODEL or --profile"),
        (["plan", "hf:gpt2", "--profile", "graph.txt"], "--profile graph.txt, not both"),
        (["plan", "hf:gpt2", "--workers", "4"], "--workers goes with --profile, not with a MODEL"),
        (["plan", "--profile", "graph.txt"], "needs --workers and --bandwidth"),
        ([*PROFILED, "--workers", "4", "--bandwidth", "1e9"], "cannot read graph.txt"),
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


def test_a_process_of_its_own_says_the_same(tmp_path: Path) -> None:
    words = ("simulate", "missing.json")
    done, same = fresh(*words, folder=tmp_path), shardwright(*words, folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", same.stderr)
    assert list(tmp_path.iterdir()) == []


LAYER = "forward_compute_time=1.0, backward_compute_time=2.0, activation_size=1000.0, parameter_size=8.0"


@pytest.fixture
def profiled(tmp_path: Path) -> Path:
    lines = [f"node{i} -- Layer({i}) -- {LAYER}" for i in range(6)]
    lines += [f"\tnode{i} -- node{i + 1}" for i in range(5)]
    (tmp_path / "graph.txt").write_text("\n".join(lines))
    return tmp_path


def test_a_profile_is_planned_beside_the_published_planners(profiled: Path) -> None:
    words = (*PROFILED, "--workers", "3", "--bandwidth", "1 GB/s")
    done = shardwright(*words, "--json", folder=profiled)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["plan"]["seconds"] == pytest.approx(0.006)
    assert answer["plan"]["bound_seconds"] == answer["plan"]["seconds"]
    assert [len(stage["layers"]) for stage in answer["plan"]["stages"]] == [2, 2, 2]
    assert {rival["planner"] for rival in answer["rivals"]} >= {"pipedream", "bapipe"}
    shown = shardwright(*words, "--microbatches", "4", "--memory", "1 MB", folder=profiled)
    assert shown.returncode == 0, shown.stderr
    assert "Optimal" in shown.stdout
    assert "node5" in shown.stdout
    assert "Replayed operation by operation" in shown.stdout
    assert [path.name for path in profiled.glob("*.json")] == []


def test_a_profile_is_planned_for_hosts_and_for_kinds_of_workers(profiled: Path) -> None:
    for workers, bandwidth in (("2x2", "1e9,1e10"), ("1,2@0.5", "1e9")):
        words = (*PROFILED, "--workers", workers, "--bandwidth", bandwidth, "--json")
        done = shardwright(*words, folder=profiled)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["plan"]["fits"]
    refused = shardwright(*PROFILED, "--workers", "2x2", "--bandwidth", "1e9", folder=profiled)
    assert refused.returncode == 2
    assert "equally many levels" in refused.stderr.replace("\n", " ")
    short = ("--workers", "2", "--bandwidth", "1e9", "--memory", "1 kB")
    nothing = shardwright(*PROFILED, *short, folder=profiled)
    assert nothing.returncode == 1
    assert "--memory-limit" in nothing.stderr  # the smallest that has a plan


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
def test_an_alternative_is_laid_beside_the_plan_with_what_decides(
    model: str, tmp_path: Path
) -> None:
    shardwright("plan", model, "-c", "1x4xV100", "-b", "8", folder=tmp_path)
    words = ("why-not", "plan.json", model, "--tp", "2", "--json")
    done = shardwright(*words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert "tensor parallel x 2" in answer["other"] or "x 2" in answer["other"]
    step = answer["rows"][0]
    assert step["name"] == "step time"
    assert step["other"] >= step["one"]
    refused = shardwright("why-not", "plan.json", model, folder=tmp_path)
    assert refused.returncode == 2
    assert "name an alternative" in refused.stderr

    shardwright("plan", model, "-c", "1x4xV100", "-b", "8", "-o", "b.json", "--seed-plan", "summa",
                folder=tmp_path)  # fmt: skip
    both = shardwright("diff", "plan.json", "b.json", model, "--json", folder=tmp_path)
    assert both.returncode == 0, both.stderr
    assert json.loads(both.stdout)["other"].startswith("summa")


@pytest.mark.torch
def test_plan_simulate_explain_and_report_follow_each_other(model: str, tmp_path: Path) -> None:
    # A fresh process plans the same bytes: tests/test_bad_input.py.
    planned = shardwright("plan", model, "-c", "1x2xV100", "-b", "8", "--json", folder=tmp_path)
    assert planned.returncode == 0, planned.stderr
    answer = json.loads(planned.stdout)
    assert answer["plans"][answer["chosen"]]["step_seconds"] > 0
    assert answer["software"] == "eager"
    first = (tmp_path / "plan.json").read_bytes()
    said = shardwright("plan", model, "-c", "1x2xV100", "-b", "8", folder=tmp_path)
    assert "Costs are those of 'eager' software on V100" in said.stdout
    assert (tmp_path / "plan.json").read_bytes() == first

    refused = shardwright("simulate", "plan.json", folder=tmp_path)
    assert refused.returncode == 2
    assert "was made for 'net.py:build'" in refused.stderr

    simulated = shardwright("simulate", "plan.json", model, "--json", folder=tmp_path)
    chosen = answer["plans"][answer["chosen"]]
    assert json.loads(simulated.stdout)["step_seconds"] == pytest.approx(chosen["step_seconds"])

    layers = ("--layers", "layers.csv")
    assert shardwright("simulate", "plan.json", model, *layers, folder=tmp_path).returncode == 0
    wanted = ("--workers", "2,8", "--link", "10GbE")
    played = shardwright("simulate", "--trace", "layers.csv", *wanted, "--json", folder=tmp_path)
    found = json.loads(played.stdout)
    assert found["bytes"] == 4 * (16 * 32 + 32 + 32 * 8 + 8)
    assert {one["workers"] for one in found["iterations"]} == {2, 8}
    assert min(one["efficiency"] for one in found["iterations"]) > 0
    trace = ("--trace", "layers.csv")
    for words in (trace, ("plan.json", model, *wanted), (*trace, *wanted, *layers)):
        assert shardwright("simulate", *words, folder=tmp_path).returncode == 2

    explained = shardwright("explain", "plan.json", model, folder=tmp_path)
    assert explained.returncode == 0, explained.stderr
    assert "linear" in explained.stdout

    report = shardwright("report", "plan.json", model, "--trace", "t.json.gz", folder=tmp_path)
    assert report.returncode == 0, report.stderr
    assert (tmp_path / "report.html").stat().st_size < 6 * 10**6
    assert (tmp_path / "t.json.gz").exists()


def test_a_contest_problem_is_solved_and_its_solution_written(tmp_path):
    problem = {"problem": CONTEST}
    (tmp_path / "p.json").write_text(json.dumps(problem))
    words = ["iopddl", "p.json", "--seconds", "60", "--out", "s.json", "--json"]
    done = shardwright(*words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    # Both at 6 would need 12; one at 3 costs 1 + 4 + 0, the other way 5 + 2 + 9.
    assert (answer["cost"], answer["bound"], answer["peak"]) == (5, 5, 9)
    assert json.loads((tmp_path / "s.json").read_text()) == answer["choice"] == [0, 1]


def test_a_contest_problem_that_cannot_fit_ends_with_1(tmp_path):
    nodes = {"intervals": [[0, 1]], "costs": [[1]], "usages": [[5]]}
    problem = {"problem": {"nodes": nodes, "edges": {"nodes": [], "costs": []}, "usage_limit": 4}}
    (tmp_path / "p.json").write_text(json.dumps(problem))
    done = shardwright("iopddl", "p.json", folder=tmp_path)
    assert done.returncode == 1
    assert "Proved: no choice keeps the limit" in done.stdout


def test_published_runs_are_laid_beside_predictions(tmp_path):
    (tmp_path / "runs.csv").write_text(
        "id,source_id,model,layers,hidden,heads,seq,vocab,gpu,gpus,micro_batch,global_batch,iter_s,ffn_hidden,ffn_type,framework\n"
        "a,a-paper-of-2021,Small,3,64,4,64,256,A100,8,1,16,0.01,,,\n"
        "b,a-paper-of-2021,Small,3,64,4,64,256,A100,7,1,16,0.01,,,\n"
        "c,s,Llama,1,1,1,1,1,A100,1,1,1,,1,swiglu,HF transformers\n"
    )
    done = shardwright("validate", "runs.csv", "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    told, refused, halved = found["cases"]
    assert told["error"] == pytest.approx(told["predicted_seconds"] / 0.01 - 1)
    assert found["overall"]["time"]["median"] == pytest.approx(abs(told["error"]))
    assert refused["reason"] == "batch does not divide"
    assert halved["reason"] == "no model of these dimensions runs"  # a head of one number is turned
    assert {one["reason"]: one["count"] for one in found["reasons"]} == dict.fromkeys(
        (refused["reason"], halved["reason"]), 1
    )
    assert found["overall"]["order"]["tau"] is None
    table = shardwright("validate", "runs.csv", "--cases", folder=tmp_path)
    assert "2 of 3 runs (66.7 %) cannot be expressed" in table.stdout
    assert (
        table.stdout.count("a-paper-of-2021") == 3
    )  # in one piece: of two runs, and of their source


def test_a_wrong_file_of_runs_is_refused_with_its_place(tmp_path):
    (tmp_path / "runs.csv").write_text(
        "id,source_id,model,layers,hidden,heads,seq,gpu,gpus\na,s,M,few,64,4,64,A100,8\n"
    )
    done = shardwright("validate", "runs.csv", folder=tmp_path)
    assert done.returncode == 2
    assert "row 2, column layers: must be a whole number" in done.stderr


def test_ctrl_c_while_the_command_line_is_imported_says_nothing(tmp_path: Path) -> None:
    slow = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"
    (tmp_path / "typer.py").write_text(slow)
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    ended = subprocess.run(
        [sys.executable, "-m", "shardwright"], check=False, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": paths},
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, "")


def test_ctrl_c_while_the_command_line_ends_says_nothing() -> None:
    late = (
        "import atexit, os, signal, time\n"
        "import shardwright.cli as cli\n"
        "def app():\n"
        "    atexit.register(lambda: (os.kill(os.getpid(), signal.SIGINT), time.sleep(60)))\n"
        "    raise SystemExit\n"
        "cli.app = app\n"
        "cli.main()\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", late], check=False, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, "")
