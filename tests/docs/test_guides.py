"""The guide's own script, copied out of its pages and run as they say: planned, then torchrun."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.docs.pages import ROOT

pytestmark = pytest.mark.ranks

# A process group that outlives its destruction aborts one run in five at exit, too seldom for one
# run to show; its threads always do.
COUNT_THREADS = """
import glob
tasks = [open(path).read().strip() for path in glob.glob("/proc/self/task/*/comm")]
count = sum("gloo" in task for task in tasks)
print(f"THREADS {count} STEPS {executor.steps}\\n", end="", flush=True)  # one write: ranks share it
"""


def snippet(page, file):
    text = (ROOT / "docs" / page).read_text()
    return re.search(rf"```python\n# {file}\n(.*?)```", text, re.DOTALL).group(1)


def finished(directory, *words):
    variables = {"SHARDWRIGHT_STORE": str(directory / "store.db"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", *words], cwd=directory, env=os.environ | variables,
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A user's directory with the model of the first page and its plan for two ranks."""
    directory = tmp_path_factory.mktemp("work")
    (directory / "mine.py").write_text(snippet("start.md", "mine.py"))
    shutil.copy(ROOT / "examples/two_cores.toml", directory / "two.toml")
    plan = finished(directory, "shardwright.cli", "plan", "mine.py:build", "--global-batch", "256",
                    "--cluster", "two.toml", "--measure", "never")  # fmt: skip
    assert plan.returncode == 0, plan.stderr
    return directory


@pytest.mark.parametrize("without", ["", "torch.distributed.destroy"])
def test_the_guides_script_trains_and_ends_under_torchrun(workplace, without):
    script = snippet("guides/train.md", "train.py").replace("range(100)", "range(2)")
    if not without:
        script += COUNT_THREADS
    kept = [line for line in script.splitlines(keepends=True) if not without or without not in line]
    (workplace / "train.py").write_text("".join(kept))
    done = finished(workplace, "torch.distributed.run", "--nproc-per-node", "2", "train.py")
    assert done.returncode == 0, done.stderr
    assert (workplace / "checkpoints").is_dir()
    if not without:
        assert done.stdout.count("THREADS 0 STEPS 2") == 2
