"""Distil measured GPU kernel tables into the package data ``planner/cost/gpu_tables.npz``.

    pip download --no-deps aiconfigurator-core==0.12.0 && unzip -d SOURCE *.whl
    python tools/distil_gpu_tables.py SOURCE [OUTPUT]

Needs pandas and pyarrow beside NumPy. The source holds measurements of inference kernels
(Apache-2.0); what is kept is one number per cell of a regular grid: the median over the frameworks
that measured it. Nothing else of the source is used. Units: log2 of 10^12 flop/s for products and
attention, log2 of seconds for collectives, ratios for grouped products.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

KINDS = {
    "A100": "a100_sxm", "H100": "h100_sxm", "H200": "h200_sxm", "B200": "b200_sxm",
    "GB200": "gb200", "L40S": "l40s",
}  # fmt: skip
DTYPES = {"bfloat16": "bfloat16", "fp8": "float8_e4m3fn"}
FEWEST_ROWS = 64  # of a product: training has no smaller ones worth a table
WIDTHS = (64, 128)  # of attention heads
HEADS = (4, 16, 64, 256, 1024)  # batch x heads, around which measurements are pooled
SEQUENCES = (256, 512, 1024, 2048, 4096, 8192, 16384)
ROWS = (16, 64, 256, 1024, 4096, 16384)  # of one expert
# Grouped products by CUTLASS, which are whole chips' best, and by Triton, as most training code has them.
GROUPED_BY = {
    "cutlass": ("moe_torch_flow", "moe_torch_flow_cutlass", "moe_torch_flow_min_latency"),
    "triton": ("sglang_fused_moe_triton", "vllm_fused_moe",
               "vllm_unquantizedfusedmoe_triton_tritonexperts"),
}  # fmt: skip
OPERATIONS = {
    "all_reduce": "all_reduce", "all_gather": "all_gather", "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
}  # fmt: skip


def tables(source: Path, system: str, pattern: str) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield every measured table of a system with its path below ``data``."""
    base = source / "aiconfigurator_core" / "systems" / "data"
    for path in sorted((base / system).glob(pattern)):
        yield str(path.relative_to(base)), pd.read_parquet(path)


def products(frames: list[pd.DataFrame], dtype: str, axes: list[np.ndarray]) -> np.ndarray | None:
    """Return log2 of 10^12 flop/s on the grid, NaN filled from the nearest larger neighbour."""
    layers = []
    for frame in frames:
        for _, one in frame[frame.gemm_dtype == dtype].groupby(["framework", "version"]):
            cells = one.groupby(["m", "n", "k"]).latency.median()
            index = pd.MultiIndex.from_product(axes)
            seconds = cells.reindex(index).to_numpy().reshape([len(axis) for axis in axes]) * 1e-3
            m, n, k = np.meshgrid(*axes, indexing="ij")
            layers.append(np.log2(2.0 * m * n * k / seconds / 1e12))
    if not layers:
        return None
    with np.errstate(all="ignore"):
        middle = np.nanmedian(layers, axis=0)
        # Waves depend on m and n, so a dent in k alone is noise.
        padded = np.pad(middle, ((0, 0), (0, 0), (1, 1)), mode="edge")
        middle = np.nanmedian([padded[..., i : i + middle.shape[2]] for i in range(3)], axis=0)
    return filled(middle)


def filled(grid: np.ndarray) -> np.ndarray:
    """Fill cells nobody measured from the neighbour before them along each dim, then behind."""
    for dim in range(grid.ndim):
        moved = np.moveaxis(grid, dim, 0)
        for order in (range(1, len(moved)), range(len(moved) - 2, -1, -1)):
            for place in order:
                before = moved[place - 1 if order.step > 0 else place + 1]
                moved[place] = np.where(np.isnan(moved[place]), before, moved[place])
    return grid


def attention(frames: list[pd.DataFrame], width: int) -> np.ndarray | None:
    """Return log2 of 10^12 flop/s of causal forward attention, by batch x heads and sequence.

    Flops are of the unmasked half. Grouping of keys and values hardly matters: pooled.
    """
    layers = []
    for frame in frames:
        kept = frame[
            (frame.attn_dtype == "bfloat16")
            & (frame.kv_cache_dtype == "bfloat16")
            & (frame.head_dim == width)
            & (frame.step == 0)
            & frame.isl.isin(SEQUENCES)
        ]
        if "window_size" in kept:
            kept = kept[~(kept.window_size > 0)]
        if not len(kept):
            continue
        work = kept.batch_size * kept.num_heads
        rate = 2.0 * work * kept.isl.astype(float) ** 2 * width / (kept.latency * 1e-3)
        place = np.abs(
            np.log2(work.to_numpy())[:, None] - np.log2(np.array(HEADS))[None, :]
        ).argmin(axis=1)
        cells = np.log2(rate / 1e12).groupby([place, kept.isl.to_numpy()]).median()
        index = pd.MultiIndex.from_product([range(len(HEADS)), SEQUENCES])
        layers.append(cells.reindex(index).to_numpy().reshape(len(HEADS), len(SEQUENCES)))
    if not layers:
        return None
    with np.errstate(all="ignore"):
        return filled(np.nanmedian(layers, axis=0))


def grouped(
    frames: list[pd.DataFrame], grid: np.ndarray, axes: list[np.ndarray], made_by: str
) -> np.ndarray:
    """Return by rows of one expert what grouped products reach of one product of all their rows.

    Of balanced loads, over the first product (gate and up) and the second.
    """
    points = []
    for frame in frames:
        kept = frame[
            (frame.moe_dtype == "bfloat16")
            & frame.distribution.isin(["balanced", "power_law_1.01"])
            & frame.kernel_source.isin(GROUPED_BY[made_by])
            & (frame.num_experts >= frame.moe_ep_size)
            & ((made_by == "cutlass") | (frame.moe_ep_size * frame.moe_tp_size == 1))
        ]
        for row in kept.itertuples():
            routed = row.num_tokens * row.topk / row.moe_ep_size
            inner, hidden = row.inter_size // row.moe_tp_size, row.hidden_size
            rows = routed / (row.num_experts / row.moe_ep_size)
            if rows < ROWS[0] / 2 or inner < 128:
                continue
            whole = sum(
                2.0 * routed * n * k / 2.0 ** float(lookup(grid, axes, (routed, n, k))) / 1e12
                for n, k in ((2 * inner, hidden), (hidden, inner))
            )
            points.append((np.log2(rows), whole / (row.latency * 1e-3)))
    if not points:
        return np.full(len(ROWS), np.nan)
    logs, ratios = np.array(points).T
    place = np.abs(logs[:, None] - np.log2(np.array(ROWS))[None, :]).argmin(axis=1)
    # The better half: a fused kernel also routes and adds up, which is priced apart.
    found = [ratios[place == i] for i in range(len(ROWS))]
    shares = filled(np.array([np.quantile(x, 0.75) if len(x) else np.nan for x in found]))
    # Triton's tiles are tuned for few rows in some of the tables: more rows could be cut into as many.
    return np.maximum.accumulate(shares) if made_by == "triton" else shares


def lookup(grid: np.ndarray, axes: list[np.ndarray], at: tuple[float, float, float]) -> float:
    """Interpolate linearly between logarithms, clamped at the ends."""
    value, places = 0.0, []
    for axis, size in zip(axes, at, strict=True):
        logs = np.log2(axis)
        x = min(max(np.log2(size), logs[0]), logs[-1])
        left = min(int(np.searchsorted(logs, x, side="right")) - 1, len(axis) - 2)
        places.append((left, (x - logs[left]) / (logs[left + 1] - logs[left])))
    for corner in range(8):
        weight, where = 1.0, []
        for dim, (left, share) in enumerate(places):
            is_right = corner >> dim & 1
            weight *= share if is_right else 1 - share
            where.append(left + is_right)
        value += weight * float(grid[tuple(where)]) if weight else 0.0
    return value


def collectives(frames: list[pd.DataFrame]) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Return log2 seconds by number of devices and bytes; sizes are elements of two bytes there."""
    frame = pd.concat([one[one.nccl_dtype == "half"] for one in frames])
    counts = np.array(sorted(frame.num_gpus.unique()))
    sizes = np.array(sorted(frame.message_size.unique()))
    found = {}
    for theirs, ours in OPERATIONS.items():
        cells = (
            frame[frame.op_name == theirs].groupby(["num_gpus", "message_size"]).latency.median()
        )
        if len(cells):
            index = pd.MultiIndex.from_product([counts, sizes])
            grid = cells.reindex(index).to_numpy().reshape(len(counts), len(sizes)) * 1e-3
            found[ours] = np.maximum.accumulate(filled(np.log2(grid)), axis=1)
    return found, counts, 2 * sizes


def distil(source: Path, output: Path) -> None:
    """Write the package data and print what it holds."""
    arrays: dict[str, np.ndarray] = {}
    about: dict[str, object] = {
        "source": "PyPI package aiconfigurator-core 0.12.0, systems/data",
        "licence": "Apache-2.0, Copyright (c) 2025-2026 NVIDIA CORPORATION & AFFILIATES",
        "changed": "medians over frameworks on a regular grid, see tools/distil_gpu_tables.py",
        "drivers": "not stated in the source",
    }
    used: dict[str, list[str]] = {}
    for name, system in KINDS.items():
        read: dict[str, list[pd.DataFrame]] = {}
        for family, pattern in {
            "gemm": "gemm/*/*/gemm_perf.parquet",
            "attention": "attention/*/*/context_attention_perf.parquet",
            "moe": "moe/*/*/moe_perf.parquet",
            "nccl": "comm/nccl/*/nccl_perf.parquet",
        }.items():
            for path, frame in tables(source, system, pattern):
                read.setdefault(family, []).append(frame)
                used.setdefault(name, []).append(path)
        every = pd.concat(read["gemm"])
        every = every[every.gemm_dtype == "bfloat16"]
        axes = [np.array(sorted(every[dim].unique())) for dim in ("m", "n", "k")]
        axes = [axis[axis >= FEWEST_ROWS].astype(float) for axis in axes]
        for dim, axis in zip(("m", "n", "k"), axes, strict=True):
            arrays[f"{name}/product/{dim}"] = axis.astype(np.int32)
        for theirs, ours in DTYPES.items():
            grid = products(read["gemm"], theirs, axes)
            if grid is None:
                continue
            arrays[f"{name}/product/{ours}"] = grid.astype(np.float16)
            if ours == "bfloat16":
                arrays |= {
                    f"{name}/grouped/{one}": grouped(read["moe"], grid, axes, one).astype(
                        np.float32
                    )
                    for one in GROUPED_BY
                }
        for width in WIDTHS:
            found = attention(read["attention"], width)
            if found is not None:
                arrays[f"{name}/attention/{width}"] = found.astype(np.float16)
        operations, counts, sizes = collectives(read["nccl"])
        arrays[f"{name}/collective/devices"] = counts.astype(np.int32)
        arrays[f"{name}/collective/bytes"] = sizes.astype(np.int64)
        for operation, found in operations.items():
            arrays[f"{name}/collective/{operation}"] = found.astype(np.float32)
    arrays["heads"] = np.array(HEADS, dtype=np.int32)
    arrays["sequences"] = np.array(SEQUENCES, dtype=np.int32)
    arrays["rows"] = np.array(ROWS, dtype=np.int32)
    about["tables"] = used
    arrays["about"] = np.array(json.dumps(about))
    np.savez_compressed(output, allow_pickle=False, **arrays)
    print(f"{output}: {output.stat().st_size / 2**20:.2f} MiB, {len(arrays)} arrays")
    for name in KINDS:
        for one in GROUPED_BY:
            print(name, "grouped by", one, np.round(arrays[f"{name}/grouped/{one}"], 2))


if __name__ == "__main__":
    target = "src/shardwright/planner/cost/gpu_tables.npz"
    distil(Path(sys.argv[1]), Path(sys.argv[2] if len(sys.argv) > 2 else target))
