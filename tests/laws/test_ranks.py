"""Law: what holds for ranks that are threads holds for processes, and for hosts on slow links.

``make laws`` runs 50 random strategies of eight ranks; `make test` a few.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings

from benchmarks.hosts import hosts, why_not
from tests.laws.models import FACTORIES
from tests.laws.remote import Case, as_json, holds
from tests.laws.strategies import Shape, shapes
from tests.runtime.world import run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
MANY = "SHARDWRIGHT_LAWS" in os.environ


def cases(names: list[str], num_ranks: int, count: int) -> list[Case]:
    """Return ``count`` random shapes of ``num_ranks`` ranks, dealt out to the models in turn."""
    drawn: list[Shape] = []

    @settings(
        max_examples=count, derandomize=not MANY, database=None, deadline=None,
        phases=(Phase.generate,),
    )  # fmt: skip
    @given(shape=shapes(num_ranks, num_ranks))
    def draw(shape: Shape) -> None:
        drawn.append(shape)

    draw()
    dealt = [(names[place % len(names)], shape) for place, shape in enumerate(drawn)]
    return sorted(dealt, key=lambda case: names.index(case[0]))


def test_random_strategies_of_eight_processes_train_as_one() -> None:
    names = list(FACTORIES) if MANY else ["mlp", "gpt"]
    tried = cases(names, 8, 50 if MANY else 4)
    messages = run_ranks(8, holds, tried, timeout=1500 if MANY else 110)
    assert len(set(messages)) == 1
    assert messages[0] > len(tried)


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "hosts can be made")
def test_random_strategies_on_four_hosts_train_as_one() -> None:
    names = list(FACTORIES) if MANY else ["mlp", "lstm_translation"]
    tried = as_json(cases(names, 4, 22 if MANY else 4))
    with hosts(4, prefix=f"swl{os.getpid() % 10000}") as found:
        ranks = [started(name, number, tried) for number, name in enumerate(found)]
        try:
            for rank in ranks:
                out, err = rank.communicate(timeout=1500 if MANY else 110)
                assert rank.returncode == 0, err
                assert "HELD with" in out
        finally:
            for rank in ranks:
                rank.kill()
                rank.communicate()


def started(name: str, number: int, tried: str) -> subprocess.Popen[str]:
    """Start torchrun with one rank in a namespace; the first host is the rendezvous."""
    words = [
        "ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run",
        "--nnodes", "4", "--nproc-per-node", "1", "--node-rank", str(number),
        "--master-addr", "10.84.0.1", "--master-port", "29500",
        "-m", "tests.laws.remote", tried,
    ]  # fmt: skip
    variables = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        words, cwd=ROOT, env=os.environ | variables, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
