"""Ranks on several hosts, started by torchrun: hosts are network namespaces with 100 Mbit/s links."""

from __future__ import annotations

import json
import os
from functools import partial

import pytest
import torch

from tests import zoo
from tests.hosts import hosts, why_not
from tests.runtime.equivalence import train_plain
from tests.runtime.world import start_torchrun

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "hosts can be made"),
]


SEEDS = [{"data": 2}, {"stages": 2, "num_microbatches": 2}]


def test_ranks_on_several_hosts_train_as_one_process() -> None:
    expected = train_plain(zoo.mlp, partial(torch.optim.SGD, lr=1.0)).losses
    with hosts(2, prefix=f"swt{os.getpid() % 10000}") as names:
        ranks = [
            start_torchrun(name, i, len(names), "tests.runtime.remote", json.dumps(SEEDS))
            for i, name in enumerate(names)
        ]
        try:
            for rank in ranks:
                out, err = rank.communicate(timeout=90)
                assert rank.returncode == 0, err
                line = next(line for line in out.splitlines() if line.startswith("LOSSES"))
                found = json.loads(line.removeprefix("LOSSES"))
                assert len(found) == len(SEEDS)
                for losses in found:
                    assert losses == pytest.approx(expected, rel=1e-10)
        finally:
            for rank in ranks:
                rank.kill()
                rank.communicate()
