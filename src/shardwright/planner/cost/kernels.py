"""Measured rates of GPU kernels: products, attention, grouped products and NCCL collectives.

The numbers come from ``gpu_tables.npz``, made by ``tools/distil_gpu_tables.py`` out of the package
aiconfigurator-core (Apache-2.0, NVIDIA); ``about`` in it names every table. They are medians over
inference frameworks of 2025-2026, on an idle host; what training makes of them is in ``software``.

Products are read by straight lines between logarithms of m, n and k. Waves of output tiles are in
the measured rows themselves (4096 beside 4353). Outside the table: beyond the largest sizes the rate
stays, below the smallest the time stays, as a kernel that does not fill the device gets no faster.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources

import numpy as np
from numpy.typing import NDArray

from shardwright.operators.counting.products import Product

# Looked up in this order by a part of the device's name; a kind without tables borrows those of the
# same silicon.
NAMES = (("GB200", "GB200"), ("GH200", "H200"), ("A100", "A100"), ("H100", "H100"),
         ("H200", "H200"), ("H800", "H100"), ("B200", "B200"), ("L40S", "L40S"))  # fmt: skip
# Types that run on the same units at the same rate as the one measured.
SAME_UNITS = {
    "float16": "bfloat16",
    "float8": "float8_e4m3fn",
    "float8_e5m2": "float8_e4m3fn",
}
# Bytes per second of one device's links where collectives were measured, one way.
LINKS = {"A100": 300e9, "H100": 450e9, "H200": 450e9, "B200": 900e9, "GB200": 900e9, "L40S": 31e9}
# Doublings of time for each halving of the heads' width below what was measured.
NARROW = 0.1
Grid = NDArray[np.floating]


@dataclass(frozen=True, eq=False)
class Curve:
    """Values at points, read by straight lines between logarithms of the points."""

    logs: tuple[float, ...]

    def place(self, size: float) -> tuple[int, float, float]:
        """Return (left point, share of the right one, doublings below the first point)."""
        x = math.log2(max(size, 1e-9))
        below = max(self.logs[0] - x, 0.0)
        left = min(max(bisect_right(self.logs, x) - 1, 0), len(self.logs) - 2)
        share = (x - self.logs[left]) / (self.logs[left + 1] - self.logs[left])
        return left, min(max(share, 0.0), 1.0), below


def _curve(points: Grid) -> Curve:
    return Curve(tuple(float(x) for x in np.log2(points.astype(float))))


@dataclass(frozen=True, eq=False)
class Kernels:
    """The tables of one kind of device. Rates are log2 of 10^12 flop/s, times log2 of seconds."""

    name: str
    sizes: tuple[Curve, Curve, Curve]
    products: dict[str, Grid]
    attention: dict[int, Grid]
    heads: Curve
    sequences: Curve
    grouped: dict[str, Grid]
    rows: Curve
    collectives: dict[str, Grid]
    devices: tuple[int, ...]
    messages: Curve
    known: dict[object, float] = field(default_factory=dict[object, float], repr=False)

    def product_rate(self, product: Product, dtype: str) -> float | None:
        """Return flop/s of a product on an idle device, None where the dtype was not measured.

        A batch fills the device like more rows of one product.
        """
        name = SAME_UNITS.get(dtype, dtype)
        if name not in self.products:
            return None
        key = (name, product)
        if key not in self.known:
            self.known[key] = self._product_rate(product, self.products[name])
        return self.known[key]

    def _product_rate(self, product: Product, grid: Grid) -> float:
        sizes = product.batch * product.m, product.n, product.k
        places = [curve.place(size) for curve, size in zip(self.sizes, sizes, strict=True)]
        return 1e12 * 2.0 ** (_between(grid, *places) - sum(below for *_, below in places))

    def attention_rate(self, heads: float, sequence: float, width: int) -> float | None:
        """Return flop/s of the unmasked flops of causal forward attention."""
        if not self.attention:
            return None
        nearest = min(self.attention, key=lambda measured: abs(measured - width))
        places = self.heads.place(heads), self.sequences.place(sequence)
        (*_, fewer), (*_, shorter) = places
        # Narrower heads than were measured leave matrix units idle, in published kernels a little.
        narrow = NARROW * max(math.log2(nearest / width), 0.0)
        value = _between(self.attention[nearest], *places)
        return 1e12 * 2.0 ** (value - fewer - 2 * shorter - narrow)

    def grouped_share(self, rows: float, made_by: str) -> float:
        """Return what grouped products of so many rows each reach of one product of all rows, ``made_by``
        CUTLASS or Triton."""
        place = self.rows.place(rows)
        return _between(self.grouped[made_by], place) * 2.0 ** -place[2]

    def collective(
        self, primitive: str, devices: int, num_bytes: float, bandwidth: float
    ) -> float | None:
        """Return the seconds of a collective within a host, None where it was not measured: other
        primitives, more devices, links of another ``bandwidth``.

        Between the measured numbers of devices the next larger one's time is taken. Below the
        smallest message the time stays, beyond the largest the rate.
        """
        grid = self.collectives.get(primitive)
        row = next((i for i, count in enumerate(self.devices) if count >= devices), None)
        if grid is None or row is None or abs(bandwidth / LINKS[self.name] - 1) > 0.1:
            return None
        left, share, _ = self.messages.place(num_bytes)
        # In the tables' single precision what lies between two equal points can be less than both.
        low, high = float(grid[row, left]), float(grid[row, left + 1])
        value = min(low + (high - low) * share, high)
        beyond = max(math.log2(max(num_bytes, 1.0)) - self.messages.logs[-1], 0.0)
        return 2.0 ** (value + beyond)


def _between(grid: Grid, *places: tuple[int, float, float]) -> float:
    """Return the value of a grid between its points, axis by axis."""
    corner = grid[tuple([slice(left, left + 2) for left, *_ in places])]
    for _, share, _ in places:
        corner = corner[0] * (1 - share) + corner[1] * share
    return float(corner)


def _tables(tables: Mapping[str, Grid], folder: str, *others: str) -> dict[str, Grid]:
    """Return the tables in a folder by what they are called there, but for some others."""
    found = {
        k.removeprefix(f"{folder}/"): v for k, v in tables.items() if k.startswith(f"{folder}/")
    }
    return {name: table for name, table in found.items() if name not in others}


@cache
def kernels_of(device: str) -> Kernels | None:
    """Return the tables of a device kind by its name, None where there are none."""
    name = next((table for part, table in NAMES if part in device), None)
    if name is None:
        return None
    path = resources.files("shardwright.planner.cost").joinpath("gpu_tables.npz")
    with path.open("rb") as file, np.load(file, allow_pickle=False) as data:
        own = _tables({key: data[key] for key in data.files if key.startswith(name)}, name)
        heads, sequences, rows = data["heads"], data["sequences"], data["rows"]
    m, n, k = (_curve(own[f"product/{dim}"]) for dim in ("m", "n", "k"))
    return Kernels(
        name=name,
        sizes=(m, n, k),
        products={
            dtype: table.astype(float)
            for dtype, table in _tables(own, "product", "m", "n", "k").items()
        },
        attention={
            int(width): table.astype(float) for width, table in _tables(own, "attention").items()
        },
        heads=_curve(heads),
        sequences=_curve(sequences),
        grouped=_tables(own, "grouped"),
        rows=_curve(rows),
        collectives=_tables(own, "collective", "devices", "bytes"),
        devices=tuple(int(count) for count in own["collective/devices"]),
        messages=_curve(own["collective/bytes"]),
    )
