"""Models that verify once judged wrongly: other dtypes, other meanings of ``p``, hidden dropout."""

from __future__ import annotations

from pathlib import Path

import pytest

import shardwright
from shardwright.core.plan import Frontier
from shardwright.errors import InputError
from shardwright.planner.space import Seed
from shardwright.verbs.request import Trial
from shardwright.verbs.results import Verification
from tests.verbs.test_verification import plan_of

pytestmark = pytest.mark.torch
MODELS = """
from dataclasses import dataclass
from typing import NamedTuple
import torch
from torch import nn
import torch.nn.functional as F

class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.head = nn.Linear(16, 4), nn.Linear(16, 8)
        self.weight = nn.Parameter(torch.randn(4, 16, 16) * 0.1)

    def forward(self, x, y):
        share, chosen = self.router(x).softmax(-1).max(-1)
        order = chosen.argsort()
        ends = F.one_hot(chosen, 4).sum(0).cumsum(0).to(torch.int32)
        made = torch._grouped_mm(x[order], self.weight, offs=ends)
        back = torch.zeros_like(made).index_add(0, order, made)
        return F.cross_entropy(self.head(back * share[:, None]), y)

class Distance(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.drop = nn.Linear(16, 8), nn.Dropout(0.1)
        self.centres = nn.Parameter(torch.randn(8, 8))

    def forward(self, x, y):
        return F.cross_entropy(-torch.cdist(self.drop(self.up(x)), self.centres), y)

class Slim(NamedTuple):
    dropout: float = 0.1

@dataclass(frozen=True)
class Frozen:
    dropout: float = 0.1

class Configured(Distance):
    def __init__(self, config):
        super().__init__()
        self.config = config

    def forward(self, x, y):
        return super().forward(F.dropout(x, self.config.dropout, self.training), y)

class Hidden(nn.Module):
    def __init__(self, noise):
        super().__init__()
        self.up, self.drop, self.noise = nn.Linear(16, 16), nn.Dropout(0.1), noise

    def forward(self, x):
        if x.sum() > 1e9:
            x = -x
        x = F.dropout(self.drop(self.up(x)), 0.2, True)
        return x + torch.randn_like(x) if self.noise else x

class Around(nn.Module):
    def __init__(self, noise):
        super().__init__()
        self.hidden, self.head = Hidden(noise), nn.Linear(16, 8)

    def forward(self, x, y):
        return F.cross_entropy(F.dropout(self.head(self.hidden(x)), 0.1, True), y)

class Noisy(Distance):
    def forward(self, x, y):
        return super().forward(x + torch.randn_like(x), y)

def slim(): return Configured(Slim())
def frozen(): return Configured(Frozen())
def around(): return Around(False)
def noisy_inside(): return Around(True)

def example_batch(batch_size=8):
    x = torch.randn(batch_size, 16, generator=torch.Generator().manual_seed(0))
    return {"x": x, "y": torch.arange(batch_size) % 8}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(MODELS)
    return tmp_path


def verified(folder: Path, name: str, seed: Seed | None = None) -> Verification:
    model = f"{folder / 'net.py'}:{name}"
    plan = plan_of(model, seed or Seed(data=2), global_batch=8)
    return shardwright.verify(Frontier(plans=(plan,)), Trial(model=model))


@pytest.mark.parametrize("name", ["Distance", "slim", "frozen"])
def test_a_power_is_no_rate_of_dropout_and_a_rate_may_stand_still(folder: Path, name: str) -> None:
    assert verified(folder, name).is_equal


def test_dropout_of_opaque_modules_and_of_plain_calls_is_off(folder: Path) -> None:
    found = verified(folder, "around")
    assert found.is_equal
    assert found.tolerance == 1e-9


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_a_product_without_float64_is_verified_in_float32(folder: Path, precision: str) -> None:
    found = verified(folder, "Experts", Seed(data=2, precision=precision))
    assert found.is_equal
    assert found.tolerance == 1e-5
    assert any("does not run in float64" in note for note in found.notes)


@pytest.mark.parametrize(
    ("name", "message"),
    [("Noisy", "draw some: randn_like; take"), ("noisy_inside", "some inside opaque modules")],
)
def test_random_numbers_are_refused_without_talk_of_rates(
    folder: Path, name: str, message: str
) -> None:
    with pytest.raises(InputError, match=message) as refusal:
        verified(folder, name)
    assert "rates to 0" not in str(refusal.value)
