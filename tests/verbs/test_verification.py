"""A plan is verified against plain PyTorch: equal, different, refused; all that changed is said."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import shardwright
from shardwright.core.plan import Frontier, Objective, Plan
from shardwright.errors import InputError, PlanMismatch
from shardwright.files.planfile import Origin, write_plan
from shardwright.operators.splitting import find_samples
from shardwright.planner.cost.recomputation import with_recomputation
from shardwright.planner.lower import lower
from shardwright.planner.space import Seed, seed_strategy
from shardwright.runtime.verify import Trained, gaps
from shardwright.verbs.carry import carry_over
from shardwright.verbs.request import Trial
from shardwright.verbs.subject import capture
from tests import zoo
from tests.command import shardwright as command

pytestmark = pytest.mark.torch
MODEL = """
import torch
from torch import nn
import torch.nn.functional as F

class Net(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 8)
        self.norm = nn.BatchNorm1d(32) if norm else nn.Dropout(0.1)

    def forward(self, x, y):
        return F.cross_entropy(self.down(self.norm(torch.relu(self.up(x)))), y)

def build():
    return Net(norm=False)

def normed():
    return Net(norm=True)

def example_batch(batch_size=8):
    return {"x": torch.zeros(batch_size, 16), "y": torch.zeros(batch_size, dtype=torch.int64)}
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "net.py").write_text(MODEL)
    return f"{tmp_path / 'net.py'}:build"


def plan_of(model: str, seed: Seed, global_batch: int = 64) -> Plan:
    graph = capture(model, global_batch=global_batch, precision=seed.precision).graph
    return Plan(
        strategy=seed_strategy(graph, seed),
        predicted=Objective(step_seconds=1.0, peak_bytes=1.0),
        model=graph.name,
        graph_fingerprint=graph.fingerprint,
        cluster_name="none",
        cluster_fingerprint="none",
        costs_fingerprint="none",
        global_batch=global_batch,
        method="seed",
        seed=0,
        version="1",
    )


@pytest.mark.parametrize(
    "seed",
    [
        Seed(data=4, zero=3, num_microbatches=2),
        Seed(tensor=2, stages=2, num_microbatches=4, precision="bfloat16"),
    ],
    ids=lambda seed: seed.label,
)
def test_a_right_plan_is_equal_and_what_shrank_is_said(model: str, seed: Seed) -> None:
    frontier = Frontier(plans=(plan_of(model, seed),))
    found = shardwright.verify(frontier, Trial(model=model))
    assert found.is_equal
    assert {row.name for row in found.rows} >= {"loss", "up.weight", "down.bias"}
    assert found.losses[0] != found.losses[2]
    assert found.global_batch == 2 * max(seed.data, 2) if seed.data > 1 else 4
    assert any("instead of 64" in note for note in found.notes)
    assert any("dropout is off" in note for note in found.notes)


DRAWN = """
def build():
    return Net(norm=False), {"x": torch.randn(8, 16), "y": torch.randint(8, (8,))}

del example_batch
"""


@pytest.mark.ranks
def test_real_ranks_train_on_what_plain_pytorch_does_where_batches_are_drawn(model: str) -> None:
    Path(model.rpartition(":")[0]).write_text(MODEL + DRAWN)
    frontier = Frontier(plans=(plan_of(model, Seed(data=2)),))
    assert shardwright.verify(frontier, Trial(model=model, ranks="processes")).is_equal


@pytest.mark.ranks
def test_real_ranks_are_equal_too(model: str) -> None:
    frontier = Frontier(plans=(plan_of(model, Seed(data=2)),))
    found = shardwright.verify(frontier, Trial(model=model, ranks="processes"))
    assert found.is_equal
    assert found.ranks == "processes"


def test_local_batch_norm_is_refused(model: str) -> None:
    model = model.replace(":build", ":normed")
    frontier = Frontier(plans=(plan_of(model, Seed(data=2)),))
    with pytest.raises(InputError, match="--batch-norm synchronised"):
        shardwright.verify(frontier, Trial(model=model))


GIVEN = """
def training_data(batch_size=8, start=0):
    x = torch.randn(batch_size, 16)
    for number in range(start, 3):
        yield {batch}
        {then}
"""


@pytest.mark.parametrize(
    ("batch", "then", "says"),
    [
        ("x", "return", "ends after 1; ask for fewer steps"),
        ("x", "raise OSError('no disk')", r"raised OSError: no disk, at net.py:\d+, for batch 1"),
        (
            '{"x": x}',
            "pass",
            r"must have the tensors \['x', 'y'\].* but 'y' is none of dict \['x'\]",
        ),
    ],
)
def test_data_that_gives_out_is_one_line(model: str, batch: str, then: str, says: str) -> None:
    file = Path(model.rpartition(":")[0])
    file.write_text(MODEL + GIVEN.format(batch=batch, then=then))
    plan = plan_of(model, Seed(data=2))
    with pytest.raises(InputError, match=says):
        shardwright.verify(Frontier(plans=(plan,)), Trial(model=model))


@pytest.mark.parametrize(
    "batch",
    [
        "(x, x.argmax(1) % 8)",
        '{"x": x, "y": x.argmax(1) % 8, "names": []}',
        "torch.randn(7, 16), torch.arange(7)",  # whatever it is asked for
    ],
)
def test_data_is_given_as_training_takes_it(model: str, batch: str) -> None:
    file = Path(model.rpartition(":")[0])
    file.write_text(MODEL + GIVEN.format(batch=batch, then="pass"))
    plan = plan_of(model, Seed(data=2))
    assert shardwright.verify(Frontier(plans=(plan,)), Trial(model=model)).is_equal


MASKED = MODEL.replace(
    "        self.norm =",
    """        self.register_buffer("mask", torch.full((32,), -torch.inf).masked_fill(torch.arange(32) < 30, 0.0))
        self.norm =""",
).replace("torch.relu(self.up(x))", "(self.up(x) + self.mask).softmax(-1)")


def test_infinities_of_a_mask_are_equal_and_hide_nothing(model: str) -> None:
    Path(model.rpartition(":")[0]).write_text(MASKED)
    found = shardwright.verify(Frontier(plans=(plan_of(model, Seed(data=2)),)), Trial(model=model))
    assert {row.name: row.difference for row in found.rows}["mask"] == 0
    assert found.is_equal
    captured = capture(model, global_batch=8)
    one, other = torch.zeros(32), torch.full((32,), 1e-3)
    one[0] = other[0] = -torch.inf
    ranks, plain = (Trained(losses=(1.0,), tensors={"mask": mask}) for mask in (one, other))
    assert gaps([ranks], plain, captured)[0].difference == pytest.approx(1.0)


def test_another_model_is_refused(model: str) -> None:
    frontier = Frontier(plans=(plan_of(model, Seed(data=2)),))
    with pytest.raises(PlanMismatch):
        shardwright.verify(frontier, Trial(model=model.replace(":build", ":normed")))


def test_the_verdict_is_the_exit_code(model: str, tmp_path: Path) -> None:
    plan = plan_of(model, Seed(data=4))
    path = write_plan(tmp_path / "plan.json", Frontier(plans=(plan,)), origin=Origin())
    good = command("verify", str(path), model, "--json", folder=tmp_path)
    assert good.returncode == 0, good.stderr
    assert json.loads(good.stdout)["equal"] is True
    strict = command("verify", str(path), model, "--tolerance", "0", folder=tmp_path)
    assert strict.returncode == 1
    assert "Different" in strict.stdout


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_strategy_follows_its_model_into_another_precision(precision: str) -> None:
    module, batch = zoo.llama()
    graph = capture(module, batch, precision=precision).graph
    exact = capture(module, batch, precision="float64").graph
    seed = Seed(data=2, tensor=2, sequence=True, stages=2, num_microbatches=2)
    strategy = with_recomputation(graph, seed_strategy(graph, seed), "selective")
    linears = [index for index, one in enumerate(graph.operators) if "linear" in one.kind]
    strategy = replace(strategy, segment_starts=tuple(linears))
    carried = carry_over(strategy, graph, exact)
    for index in carried.recompute_operators:
        assert exact.operators[index].kind in {
            graph.operators[other].kind for other in strategy.recompute_operators
        }
    starts = [exact.operators[index].kind for index in carried.segment_starts]
    assert starts == [graph.operators[index].kind for index in linears]
    readers = [exact.tensors[tensor].producer for tensor in carried.reshard_again]
    assert readers
    assert min(readers) >= 0
    assert len(carried.configs) == len(exact.operators)
    assert lower(exact, carried, find_samples(exact)).num_instructions > 0
