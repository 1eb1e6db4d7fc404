"""Precisions that some devices do not have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import shardwright
from shardwright import api
from shardwright.errors import InputError, PrecisionError
from shardwright.files.clusterfile import parse_cluster
from shardwright.verbs.precision import possible_precision


@pytest.mark.parametrize("precision", ["fp8", "fp8-row"])
def test_8_bit_products_are_refused_where_a_device_has_none(precision: str) -> None:
    assert possible_precision(parse_cluster("2x8xH100"), precision) == precision
    assert possible_precision(parse_cluster("2x8xA100"), "auto") == "bfloat16"
    with pytest.raises(
        InputError, match="A100-SXM4-80GB has rates for float32, float16, bfloat16 "
    ):
        possible_precision(parse_cluster("2x8xA100"), precision)


def spectrum(x: Tensor) -> Tensor:
    return torch.fft.rfft(x).abs()


def eigenvalues(x: Tensor) -> Tensor:
    return torch.linalg.eigvalsh(x.mT @ x)


def unseen(x: Tensor) -> Tensor:
    """What export cannot follow: it runs in an opaque module."""
    return torch.linalg.qr(x).R if float(x.detach().sum()) != 1.5 else x


def cast(x: Tensor) -> Tensor:
    return torch.fft.rfft(x.float()).abs().to(x.dtype)


class Around(nn.Module):
    """A layer around a function."""

    def __init__(self, part: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.part, self.linear = part, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.part(self.linear(x)).square().mean()


@pytest.mark.torch
@pytest.mark.usefixtures("short_climbs")
@pytest.mark.parametrize("part", [spectrum, eigenvalues, unseen])
def test_what_has_no_kernels_for_16_bits_is_planned_in_float32_or_refused(
    part: Callable[[Tensor], Tensor],
) -> None:
    batch = {"x": torch.randn(8, 8)}
    study = api.study(Around(part), "1x1xA100", batch=batch)
    assert study.frontier.best.strategy.precision == "float32"
    assert any(note.startswith("planned in float32, not in bfloat16") for note in study.notes)
    says = r"has none for a part: .*; plan in float32 \(--precision float32\).*test_precision.py:\d"
    with pytest.raises(PrecisionError, match=says):
        shardwright.plan(Around(part), "1x1xA100", batch=batch, precision="bfloat16")


NAMED = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return torch.fft.rfft(self.linear(x)).abs().square().mean()

def build():
    return Net(), {"x": torch.randn(10, 8)}
"""


@pytest.mark.torch
@pytest.mark.usefixtures("short_climbs")
def test_so_is_a_model_by_name_whose_batch_is_made_larger(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NAMED)
    study = api.study(f"{tmp_path}/net.py:build", "1x1xA100", api.Request(global_batch=24))
    assert study.frontier.best.strategy.precision == "float32"
    assert any(note.startswith("planned in float32, not in bfloat16") for note in study.notes)


@pytest.mark.torch
@pytest.mark.usefixtures("short_climbs")
def test_what_casts_by_itself_is_planned_in_16_bits() -> None:
    found = shardwright.plan(Around(cast), "1x1xA100", batch={"x": torch.randn(8, 8)})
    assert found.best.strategy.precision == "bfloat16"
