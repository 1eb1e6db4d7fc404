"""Training from the command line: resume is exact, a killed rank is named, comparing works."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

from shardwright.runtime.capture import load_model
from shardwright.runtime.train import build_seeded
from tests import command
from tests.command import shardwright, start
from tests.docs.pages import ROOT
from tests.processes import wait_until

pytestmark = [
    pytest.mark.ranks, pytest.mark.timeout(300), pytest.mark.usefixtures("short_climbs"),
]  # fmt: skip

MODEL = (
    command.MODEL
    + """
import itertools

def training_data(batch_size=8, start=0):
    for step in itertools.count(start):
        random = torch.Generator().manual_seed(step)
        x = torch.randn(batch_size, 16, generator=random)
        yield {"x": x, "y": x[:, :8].argmax(1)}
"""
)


def finish(*words: str, folder: Path) -> dict[str, object]:
    done = shardwright(*words, "--json", folder=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and a plan on two devices."""
    tmp_path = tmp_path_factory.mktemp("planned")
    (tmp_path / "net.py").write_text(MODEL)
    finish(
        "plan", "net.py:build", "-c", "1x2xV100", "-b", "8", "--seed-plan", "megatron:2x1",
        folder=tmp_path,
    )  # fmt: skip
    (tmp_path / "pick").write_text("0")
    return tmp_path


@pytest.fixture
def planned(made: Path, tmp_path: Path) -> Path:
    """A fresh copy of that folder."""
    return Path(shutil.copytree(made, tmp_path / "copy"))


DATA = """
import torch
from torch.utils.data import DataLoader, TensorDataset

x = torch.randn(40, 16, generator=torch.Generator().manual_seed(1))
data = TensorDataset(x, x[:, :8].argmax(1))

def loader():
    return DataLoader(data, batch_size=8, shuffle=True, num_workers=1)

def stream():
    yield from loader()
"""


def test_a_run_trains_on_a_loader_epoch_after_epoch_and_resumes_within_one(planned: Path) -> None:
    (planned / "data.py").write_text(DATA)
    pick = (planned / "pick").read_text()
    words = ("run", "plan.json", "net.py:build", "--pick", pick, "--loader", "data.py:loader")
    whole = finish(*words, "-n", "12", folder=planned)
    first = finish(*words, "-n", "7", "--checkpoint-dir", "ck", folder=planned)
    rest = finish(*words, "-n", "12", "--checkpoint-dir", "ck", "--resume", folder=planned)
    assert first["losses"] + rest["losses"] == whole["losses"]  # type: ignore[operator]
    assert 0 <= rest["input_share"] <= 1  # type: ignore[operator]
    other = finish(*words[:-1], "data.py:stream", "-n", "6", folder=planned)
    assert len(other["losses"]) == 6  # type: ignore[arg-type]
    asked = shardwright(*words[:-1], "data.py:nothing", "-n", "6", folder=planned)
    assert asked.returncode == 2, asked.stderr
    assert "has no function 'nothing'; it defines loader, stream" in " ".join(asked.stderr.split())


SLOW = """
import time
import torch
from torch.utils.data import DataLoader, Dataset

class Slow(Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        time.sleep(0.002)
        x = torch.ones(16)
        return {"x": x, "y": torch.tensor(1)}

loader = DataLoader(Slow(), batch_size=8, num_workers=1)
"""


def test_a_plan_for_a_slow_loader_splits_its_reading_and_says_that_input_binds(
    made: Path, tmp_path: Path
) -> None:
    """Of 8 samples of 2 ms at least, the two ranks read half each."""
    folder = Path(shutil.copytree(made, tmp_path / "copy"))
    (folder / "slow.py").write_text(SLOW)
    shutil.copy(ROOT / "examples/two_cores.toml", folder / "two.toml")
    words = ("plan", "net.py:build", "-c", "two.toml", "-b", "8", "--measure", "never")
    free = finish(*words, "-o", "free.json", folder=folder)
    slow = finish(*words, "--loader", "slow.py:loader", "-o", "slow.json", folder=folder)
    best, other = (one["plans"][one["chosen"]] for one in (slow, free))  # type: ignore[index]
    assert best["devices"] == 2
    assert best["step_seconds"] >= 4 * 0.002 > 2 * other["step_seconds"]
    told = shardwright("explain", "slow.json", "net.py:build", folder=folder)
    assert told.returncode == 0, told.stderr
    assert "input binds: a rank's loader takes" in " ".join(told.stdout.split())


def test_a_run_tells_what_the_rank_waited_whose_loader_is_slowest(planned: Path) -> None:
    """The first rank waits for the other in the step: its own loader has long given its batch."""
    (planned / "data.py").write_text(
        "import os, time\n"
        + DATA
        + "class Late(list):\n"
        + "    def __iter__(self):\n"
        + "        for batch in loader():\n"
        + "            time.sleep(0.5 * int(os.environ['RANK']))\n"
        + "            yield batch\n"
        + "late = Late()\n"
    )
    pick = (planned / "pick").read_text()
    words = ("run", "plan.json", "net.py:build", "--pick", pick, "--loader", "data.py:late")
    done = finish(*words, "-n", "5", folder=planned)
    assert done["input_seconds"] > 0.02  # type: ignore[operator]


def test_a_run_clips_to_the_plans_norm_and_reports_it(made: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made, tmp_path / "copy"))
    finish(
        "plan", "net.py:build", "-c", "1x2xV100", "--seed-plan", "megatron:2x1", "--clip", "0.05",
        "--precision", "float32", "-o", "clipped.json", folder=folder,
    )  # fmt: skip
    done = finish("run", "clipped.json", "net.py:build", "-n", "2", "--lr", "0", folder=folder)
    assert done["gradient_norms"] == pytest.approx(norms(folder, 2), rel=1e-5)
    for words, says in (
        (("plan.json", "net.py:build", "--clip", "1"), "this one does not clip at 1.0"),
        (("clipped.json", "net.py:build", "--clip", "0"), "needs a norm above 0"),
    ):
        refused = shardwright("run", *words, "-n", "1", folder=folder)
        assert refused.returncode == 2, refused.stderr
        assert says in " ".join(refused.stderr.split())


def test_a_run_tells_the_noise_scale_of_its_gradients(made: Path, tmp_path: Path) -> None:
    """Of one step, so that no average takes part: two halves of a batch of 8, by plain PyTorch."""
    folder = Path(shutil.copytree(made, tmp_path / "copy"))
    done = finish("run", "plan.json", "net.py:build", "-n", "1", "--noise-scale", folder=folder)
    source = load_model(f"{folder}/net.py:build")
    module, squares = build_seeded(source), list[float]()
    batch = next(iter(source.batches(8)))
    for rows in (slice(0, 4), slice(4, 8), slice(0, 8)):
        module.zero_grad()
        module(**{name: tensor[rows] for name, tensor in batch.items()}).backward()
        squares.append(
            sum(float(p.grad.square().sum()) for p in module.parameters() if p.grad is not None)
        )
    local, whole = (squares[0] + squares[1]) / 2, squares[2]
    expected = (local - whole) / (1 / 4 - 1 / 8) / ((8 * whole - 4 * local) / 4)
    assert done["noise_scale"] == pytest.approx(expected, rel=1e-4)


def norms(folder: Path, steps: int) -> list[float]:
    """Return the gradient's norm of each of the first batches, by plain PyTorch."""
    source = load_model(f"{folder}/net.py:build")
    module, found = build_seeded(source), list[float]()
    for batch in itertools.islice(source.batches(8), steps):
        module.zero_grad()
        module(**batch).backward()
        found.append(float(nn.utils.clip_grad_norm_(module.parameters(), 0.05)))
    return found


def beside(act: Callable[[], None], *words: str, folder: Path) -> command.Done:
    """Run a command in this process, whose ranks are forked from a warm one, and act meanwhile."""
    acting = threading.Thread(target=act)
    acting.start()
    done = shardwright(*words, folder=folder)
    acting.join()
    return done


def test_a_killed_rank_ends_the_run_with_its_name(planned: Path) -> None:
    words = ("run", "plan.json", "net.py:build", "--pick", (planned / "pick").read_text(), "--checkpoint-dir", "ck")  # fmt: skip
    killed = list[float]()

    def kill() -> None:
        assert wait_until((planned / "ck" / "latest").exists, 120)
        killed.append(time.monotonic())
        os.kill(trained(os.getpid())[1], signal.SIGKILL)

    done = beside(kill, *words, "-n", "1000000", "--checkpoint-every", "20", folder=planned)
    assert time.monotonic() - killed[0] < 30
    assert done.returncode == 1
    assert "was killed by SIGKILL" in done.stderr
    assert "rank 1 (stage" in done.stderr
    assert done.stdout == ""
    latest = (planned / "ck" / "latest").read_text().strip()
    step = int(latest.rpartition("-")[2])
    resumed = finish(*words, "-n", str(step + 2), "--resume", folder=planned)
    assert resumed["first_step"] == step


ENDLESS = ("-n", "1000000", "--checkpoint-every", "1000000", "--json")


def endless(folder: Path, *words: str) -> tuple[subprocess.Popen[str], list[int]]:
    """Start training for ever; return the launcher and its ranks once they are about to train."""
    run = start(*words, *ENDLESS, folder=folder, start_new_session=True)
    ranks: list[int] = []
    deadline = time.monotonic() + 120
    while len(ranks) < 2 and time.monotonic() < deadline:
        assert run.poll() is None, run.communicate()[1]
        time.sleep(0.1)
        ranks = trained(run.pid)
    return run, ranks


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_closed_terminal_and_ctrl_c_save_and_exit_with_their_numbers(
    planned: Path, number: int
) -> None:
    pick = (planned / "pick").read_text()
    words = ("run", "plan.json", "net.py:build", "--pick", pick, "--checkpoint-dir", "ck", *ENDLESS)
    ranks = list[int]()

    def end() -> None:
        assert wait_until(lambda: len(trained(os.getpid())) == 2, 120)
        ranks.extend(trained(os.getpid()))
        for process in (os.getpid(), *ranks):  # as a terminal does
            os.kill(process, number)

    done = beside(end, *words, folder=planned)
    assert done.returncode == 128 + number, done.stderr
    assert "Traceback" not in done.stderr
    assert not any(Path(f"/proc/{rank}/task").exists() for rank in ranks)
    answer = json.loads(done.stdout)
    assert Path(answer["checkpoint"]).name == f"step-{len(answer['losses']):08d}"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ranks_that_have_nothing_to_save_yet_are_not_waited_for(planned: Path, number: int) -> None:
    wait = "if 'RANK' in os.environ: open('begun', 'w').close(); time.sleep(1000)"
    slow = MODEL.replace("def build():", f"import os, time\n\ndef build():\n    {wait}")
    (planned / "slow.py").write_text(slow)
    (planned / "begun").unlink(missing_ok=True)
    words = ("--pick", (planned / "pick").read_text(), "--checkpoint-dir", "none", "--json")

    def end() -> None:
        assert wait_until((planned / "begun").exists, 120)
        os.kill(os.getpid(), number)

    done = beside(end, "run", "plan.json", "slow.py:build", *words, folder=planned)
    assert (done.returncode, done.stdout) == (128 + number, "")
    assert "Traceback" not in done.stderr
    assert not (planned / "none").exists()


def test_termination_saves_ends_all_ranks_and_exits_143(planned: Path) -> None:
    pick = (planned / "pick").read_text()
    words = ("run", "plan.json", "net.py:build", "--pick", pick, "--checkpoint-dir", "ck")
    run, ranks = endless(planned, *words)
    run.terminate()  # as `timeout` does: first to the process, then to its whole group
    os.killpg(run.pid, signal.SIGTERM)
    out, err = run.communicate(timeout=60)
    assert run.returncode == 128 + signal.SIGTERM, err
    assert not any(Path(f"/proc/{rank}/task").exists() for rank in ranks)
    answer = json.loads(out)
    losses, step = answer["losses"], len(answer["losses"])
    assert Path(answer["checkpoint"]).name == f"step-{step:08d}"
    resumed = finish(*words, "-n", str(step + 2), "--resume", folder=planned)
    whole = finish(*words[:-2], "-n", str(step + 2), folder=planned)
    assert losses + resumed["losses"] == whole["losses"]


def trained(pid: int) -> list[int]:
    """Return the ranks of a run that are about to train, in their order: they have mapped their status files and explained them."""
    found: dict[int, int] = {}
    for process in descendants(pid):
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{process}/maps").read_text()
            file = re.search(r"\S+\.status", maps)
            if file and Path(file[0]).with_suffix(".instructions").exists():
                found[int(Path(file[0]).stem)] = process
    return [process for _, process in sorted(found.items())]


def descendants(pid: int) -> list[int]:
    """Return the children of a process and theirs."""
    found: list[int] = []
    pending = [pid]
    while pending:
        children = Path(f"/proc/{pending.pop()}/task").glob("*/children")
        for file in children:
            numbers = [int(word) for word in file.read_text().split()]
            found += numbers
            pending += numbers
    return found


def test_comparing_reports_predicted_and_measured(planned: Path) -> None:
    pick = (planned / "pick").read_text()
    answer = finish(
        "compare", "plan.json", "net.py:build", "-n", "3", "--pick", pick, "--trace", "t.json",
        folder=planned,
    )  # fmt: skip
    rows = {row["name"]: row for row in answer["rows"]}  # type: ignore[attr-defined, index]
    for name in ("step time", "peak memory", "forward", "backward"):
        assert rows[name]["predicted"] > 0
        assert rows[name]["measured"] > 0
    events = json.loads((planned / "t.json").read_text())["traceEvents"]
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert len(names) == 4


def test_a_plan_for_more_devices_than_there_are_is_refused(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(MODEL)
    finish(
        "plan", "net.py:build", "-c", "64x8xH100", "-b", "4096", "--seed-plan", "megatron:8x1",
        folder=tmp_path,
    )  # fmt: skip
    run = shardwright("run", "plan.json", "net.py:build", folder=tmp_path)
    assert run.returncode == 2
    assert "but this machine has" in run.stderr
