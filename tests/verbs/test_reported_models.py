"""Small models in the manner of those that strangers brought along and that planning stumbled over."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright import api
from shardwright.planner.space import Seed
from shardwright.runtime.capture import capture
from tests.runtime.equivalence import assert_close, assert_equivalent, train_plain
from tests.runtime.rehearsed import train_rehearsed
from tests.runtime.strategies import named

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("short_climbs")]
sgd = partial(torch.optim.SGD, lr=0.1)


class Inverted(nn.Module):
    """MobileNetV3's block: widened, convolved by channel, squeezed and excited, narrowed."""

    def __init__(self, dim: int, wide: int) -> None:
        super().__init__()
        self.expand, self.norm = nn.Conv2d(dim, wide, 1, bias=False), nn.BatchNorm2d(wide)
        self.depth = nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False)
        self.squeeze, self.excite = nn.Conv2d(wide, 6, 1), nn.Conv2d(6, wide, 1)
        self.project = nn.Conv2d(wide, dim, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.hardswish(self.depth(F.hardswish(self.norm(self.expand(x)))))
        share = F.hardsigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(y, 1)))))
        return x + self.project(y * share)


class MobileNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block = nn.Conv2d(3, 8, 3, stride=2, padding=1), Inverted(8, 18)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.block(self.stem(x)).mean((2, 3))), y)


def mobile_net(batch_size: int = 8) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    x = torch.randn(batch_size, 3, 9, 9, dtype=torch.float64)
    return MobileNet().double(), {"x": x, "y": torch.arange(batch_size) % 5}


@pytest.mark.parametrize("devices", [4, 8])
def test_blocks_of_odd_channels_plan_on_four_and_eight_devices_and_train_equally(
    devices: int,
) -> None:
    module, batch = mobile_net()
    options = {"precision": "float64", "batch_norm": "synchronised", "seconds": 0.2}
    frontier = api.plan(module, f"1x{devices}xH100", batch=batch, **options)
    captured = capture(module, batch, batch_norm="synchronised")
    runs, _ = train_rehearsed(captured, frontier.best.strategy, module, batch, sgd)
    assert_close(runs[0], train_plain(mobile_net, sgd), frontier.best.strategy.label)


class Perceiver(nn.Module):
    """Few learned rows that look at many given ones, then at each other."""

    def __init__(self) -> None:
        super().__init__()
        self.latents, self.norm = nn.Parameter(torch.randn(4, 8)), nn.LayerNorm(8)
        self.cross = nn.MultiheadAttention(8, 2, kdim=6, vdim=6, batch_first=True)
        self.own = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        rows = self.latents.unsqueeze(0).expand(len(x), -1, -1)
        rows = rows + self.cross(self.norm(rows), x, x, need_weights=False)[0]
        return F.cross_entropy(self.head(self.own(rows).mean(1)), y)


def perceiver() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Perceiver().double(), {
        "x": torch.randn(4, 10, 6, dtype=torch.float64),
        "y": torch.arange(4),
    }


def test_latents_of_all_samples_train_equally_under_megatron() -> None:
    assert_equivalent(4, perceiver, named(Seed(data=2, tensor=2)), sgd)


TAGGER = """
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 4, batch_first=True)
    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0]

class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = Inner(), nn.Linear(4, 3)
    def forward(self, x, lengths, y):
        z = self.head(self.inner(x, lengths))
        return nn.functional.ctc_loss(z.log_softmax(-1).transpose(0, 1), y, lengths, y.new_full((len(y),), 2))

def tagger(batch_size=4):
    torch.manual_seed(0)
    lengths = 4 + torch.arange(batch_size) % 3
    return Tagger(), {"x": torch.randn(batch_size, 6, 4), "lengths": lengths,
                      "y": torch.ones(batch_size, 2, dtype=torch.int64)}
"""


def test_packed_sequences_with_a_ctc_loss_are_planned_with_the_packing_alone_opaque(
    tmp_path: Path,
) -> None:
    path = tmp_path / "tagger.py"
    path.write_text(TAGGER, encoding="utf-8")
    graph = api.capture(f"{path}:tagger").graph
    opaque = [one.kind for one in graph.operators if one.kind.startswith("opaque.")]
    assert opaque == ["opaque.Inner"]
    assert api.plan(f"{path}:tagger", "1x2xH100", seconds=0.2).best.strategy.configs
