"""The guides' own scripts and commands, copied out of their pages and run as they say."""

import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from torch.distributed.run import parse_args

from shardwright.ddp import hooks
from tests.command import shardwright
from tests.docs.pages import ROOT
from tests.hosts import hosts, why_not
from tests.runtime.world import FIRST_HOST, PORT, run_script

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
    return re.search(rf"```\w+\n# {file}\n(.*?)```", text, re.DOTALL).group(1)


def commands(page, first):
    """Return the shell commands of a page's snippet that begins with a word."""
    text = (ROOT / "docs" / page).read_text()
    return re.search(rf"```sh\n({first} .*?)```", text, re.DOTALL).group(1)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A user's directory with the model of the first page and its plan for two ranks."""
    directory = tmp_path_factory.mktemp("work")
    (directory / "mine.py").write_text(snippet("start.md", "mine.py"))
    shutil.copy(ROOT / "examples/two_cores.toml", directory / "two.toml")
    plan = shardwright("plan", "mine.py:build", "--global-batch", "256", "--cluster", "two.toml",
                       "--measure", "never", "--seed-plan", "megatron:2x1", folder=directory)  # fmt: skip
    assert plan.returncode == 0, plan.stderr
    return directory


@pytest.mark.usefixtures("short_climbs")
def test_the_guide_to_pipelines_without_flushes_plans_and_trains(workplace):
    plan, _ = commands("guides/asynchronous.md", "shardwright plan").splitlines()
    assert shardwright(*plan.split()[1:], "--measure", "never", folder=workplace).returncode == 0
    script = snippet("guides/asynchronous.md", "flushless.py").replace("range(100)", "range(4)")
    (workplace / "flushless.py").write_text(script)
    said = "".join(run_script(workplace / "flushless.py"))
    numbers = [line.split()[1] for line in said.splitlines() if line.startswith("batch")]
    assert numbers == ["1:", "2:", "3:", "4:"]


def test_the_guides_script_trains_and_leaves_no_thread(workplace):
    script = snippet("guides/train.md", "train.py").replace("range(100)", "range(2)")
    (workplace / "train.py").write_text(script + "print('STEPS', executor.steps)")
    assert all("STEPS 2" in said for said in run_script(workplace / "train.py"))
    assert (workplace / "checkpoints").is_dir()


@pytest.mark.skipif("SHARDWRIGHT_LAWS" not in os.environ, reason="in `make laws`")
@pytest.mark.parametrize("without", ["", "torch.distributed.destroy"])
def test_the_guides_script_trains_and_ends_under_torchrun(workplace, without):
    script = snippet("guides/train.md", "train.py").replace("range(100)", "range(2)")
    if not without:
        script += COUNT_THREADS
    kept = [line for line in script.splitlines(keepends=True) if not without or without not in line]
    (workplace / "train.py").write_text("".join(kept))
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py"],
        cwd=workplace, env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (workplace / "checkpoints").is_dir()
    if not without:
        assert done.stdout.count("THREADS 0 STEPS 2") == 2


def test_the_guides_script_for_data_sets_ends_at_its_last_epoch_also_when_it_is_started_again(
    workplace,
):
    (workplace / "epochs.py").write_text(
        snippet("guides/train.md", "epochs.py")
        + "print('ENDED AT', executor.steps, executor.epochs)"
    )
    for _ in range(2):
        assert [text.count("ENDED AT 4 2") for text in run_script(workplace / "epochs.py")] == [
            1,
            1,
        ]


def test_the_guide_on_caches_reads_and_prepares_every_sample_once_an_epoch(tmp_path):
    expected = {"cached.py": "100 samples, 100 cached\n", "shared.py": "100 samples\n"}
    for script, line in expected.items():
        (tmp_path / script).write_text(snippet("guides/caching.md", script))
        done = subprocess.run(
            [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=100,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout.count(line) == 2


@pytest.mark.parametrize(
    ("page", "file", "says"),
    [
        ("ddp.md", "buckets.py", r"\(\d+.*default .* s, kept: (True|False)"),
        ("ddp.md", "compressed.py", "12 steps, 0 skipped"),
        ("lossy-networks.md", "lossy_ddp.py", r"lost 0\.\d\d% of values, sent again \d"),
    ],
)
def test_the_scripts_for_plain_ddp_run_as_they_say(tmp_path, page, file, says):
    (tmp_path / file).write_text(snippet(f"guides/{page}", re.escape(file)))
    assert re.search(says, run_script(tmp_path / file)[0])
    if file == "compressed.py":
        states = [torch.load(tmp_path / f"compressor-{rank}.pt") for rank in range(2)]
        assert [one["ranks"] for one in states] == [2, 2]
        assert len(hooks.reshared(states, ranks=4)) == 4


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "hosts can be made")
@pytest.mark.usefixtures("short_climbs")
def test_the_hosts_guide_trains_on_four_hosts(tmp_path):
    (tmp_path / "mine.py").write_text(snippet("start.md", "mine.py"))
    (tmp_path / "cluster.toml").write_text(snippet("guides/hosts.md", "cluster.toml"))
    script = snippet("guides/train.md", "train.py").replace("range(100)", "range(2)")
    (tmp_path / "train.py").write_text(script + "print(f'loss {float(step.loss):.6f}')\n")
    for line in commands("guides/hosts.md", "shardwright").splitlines():
        done = shardwright(*line.split()[1:], folder=tmp_path)
        assert done.returncode == 0, done.stderr
    assert "Equal: all" in done.stdout
    # As torchrun understands it, this is what the ranks below are given.
    interface, start = commands("guides/hosts.md", "export").splitlines()
    assert interface == "export GLOO_SOCKET_IFNAME=eth0"
    said = parse_args(start.replace("$NODE", "3").split()[1:])
    assert (said.nnodes, said.nproc_per_node, said.node_rank) == ("4", "1", 3)
    assert (said.master_addr, said.master_port) == (FIRST_HOST, int(PORT))
    assert said.training_script == "train.py"
    with hosts(4, prefix=f"swg{os.getpid() % 10000}") as names:
        texts = run_script(tmp_path / "train.py", hosts=names)
    losses = {line for text in texts for line in re.findall("loss .*", text)}
    (loss,) = losses
    assert float(loss.split()[1]) == pytest.approx(plain_loss(tmp_path, script), rel=1e-5)
    assert (tmp_path / "checkpoints").is_dir()


def plain_loss(folder, script):
    """The last loss of the guide's batches by plain PyTorch, from the weights of its seed."""
    names = {}
    with torch.random.fork_rng():
        exec((folder / "mine.py").read_text(), names)
        exec(re.search(r"def batches\(\):.*?(?=\n\n)", script, re.DOTALL).group(), names)
        exec(re.search(r"torch\.manual_seed\(.*\)", script).group(), names)
        module, _ = names["build"]()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    for batch in names["batches"]():
        loss = module(**batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def test_the_guide_on_operators_verifies_and_finds_rules(workplace):
    page = (ROOT / "docs/guides/add-an-operator.md").read_text()
    lines = re.findall(r"^shardwright (.*)$", page, re.MULTILINE)
    assert len(lines) == 3
    for line in lines:
        done = shardwright(*line.split(), folder=workplace)
        assert done.returncode == 0, done.stderr
    assert "holds" in done.stdout
