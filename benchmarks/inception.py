"""Inception-v3 (Szegedy et al., arXiv 1512.00567), its main branch, written out for planning."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IMAGE_SIZE = 299
Size = int | tuple[int, int]


class Unit(nn.Sequential):
    """Convolution, batch norm, ReLU."""

    def __init__(self, wide: int, out: int, kernel: Size, stride: int = 1, pad: Size = 0) -> None:
        super().__init__(
            nn.Conv2d(wide, out, kernel, stride, pad, bias=False), nn.BatchNorm2d(out), nn.ReLU()
        )


class Branches(nn.Module):
    """Branches side by side, joined along the channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


def _pooled(wide: int, out: int) -> nn.Module:
    return nn.Sequential(nn.AvgPool2d(3, 1, 1), Unit(wide, out, 1))


def _first(wide: int, pooled: int) -> nn.Module:
    """Figure 5: 1x1; 5x5; two 3x3; pooling."""
    double = (Unit(wide, 64, 1), Unit(64, 96, 3, pad=1), Unit(96, 96, 3, pad=1))
    five = nn.Sequential(Unit(wide, 48, 1), Unit(48, 64, 5, pad=2))
    return Branches(Unit(wide, 64, 1), five, nn.Sequential(*double), _pooled(wide, pooled))


def _second(wide: int, inner: int) -> nn.Module:
    """Figure 6: 7x7 factored into rows and columns."""
    row, column = (1, 7), (7, 1)
    single = (
        Unit(wide, inner, 1),
        Unit(inner, inner, row, pad=(0, 3)),
        Unit(inner, 192, column, pad=(3, 0)),
    )
    double = (
        Unit(wide, inner, 1),
        Unit(inner, inner, column, pad=(3, 0)),
        Unit(inner, inner, row, pad=(0, 3)),
        Unit(inner, inner, column, pad=(3, 0)),
        Unit(inner, 192, row, pad=(0, 3)),
    )
    return Branches(
        Unit(wide, 192, 1), nn.Sequential(*single), nn.Sequential(*double), _pooled(wide, 192)
    )


def _third(wide: int) -> nn.Module:
    """Figure 7: 3x3 spread out into a row and a column side by side."""

    def spread(width: int) -> nn.Module:
        return Branches(Unit(width, 384, (1, 3), pad=(0, 1)), Unit(width, 384, (3, 1), pad=(1, 0)))

    single = nn.Sequential(Unit(wide, 384, 1), spread(384))
    double = nn.Sequential(Unit(wide, 448, 1), Unit(448, 384, 3, pad=1), spread(384))
    return Branches(Unit(wide, 320, 1), single, double, _pooled(wide, 192))


def _reductions() -> tuple[nn.Module, nn.Module]:
    """The two grids are halved by strided convolutions beside pooling."""
    double = (Unit(288, 64, 1), Unit(64, 96, 3, pad=1), Unit(96, 96, 3, 2))
    one = Branches(Unit(288, 384, 3, 2), nn.Sequential(*double), nn.MaxPool2d(3, 2))
    single = nn.Sequential(Unit(768, 192, 1), Unit(192, 320, 3, 2))
    seven = (
        Unit(768, 192, 1),
        Unit(192, 192, (1, 7), pad=(0, 3)),
        Unit(192, 192, (7, 1), pad=(3, 0)),
        Unit(192, 192, 3, 2),
    )
    return one, Branches(single, nn.Sequential(*seven), nn.MaxPool2d(3, 2))


class InceptionV3(nn.Module):
    """Stem, three, four and two modules of the three sorts, and a classifier."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        one, two = _reductions()
        self.stem = nn.Sequential(
            Unit(3, 32, 3, 2), Unit(32, 32, 3), Unit(32, 64, 3, pad=1), nn.MaxPool2d(3, 2),
            Unit(64, 80, 1), Unit(80, 192, 3), nn.MaxPool2d(3, 2),
        )  # fmt: skip
        inner = (128, 160, 160, 192)
        self.modules_ = nn.Sequential(
            _first(192, 32), _first(256, 64), _first(288, 64), one,
            *(_second(768, width) for width in inner), two, _third(1280), _third(2048),
        )  # fmt: skip
        self.head = nn.Linear(2048, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.modules_(self.stem(images)).mean((2, 3))
        return F.cross_entropy(self.head(x), labels)


def inception() -> nn.Module:
    """Build the model."""
    return InceptionV3()


def inception_batch(batch_size: int) -> dict[str, Tensor]:
    """Return images and classes."""
    images = torch.zeros(batch_size, 3, IMAGE_SIZE, IMAGE_SIZE)
    return {"images": images, "labels": torch.zeros(batch_size, dtype=torch.long)}
