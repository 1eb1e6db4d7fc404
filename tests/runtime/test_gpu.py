"""What is written for GPUs, on one: every rank's tensors on it, against plain PyTorch and the same Program on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardwright.core.graph import KEPT_AS
from shardwright.core.strategy import Compressor, Precision, Strategy
from shardwright.ddp import Compression, hooks, wrap
from shardwright.ddp.methods import METHODS
from shardwright.planner.lower import lower
from shardwright.planner.space.seeds import Seed, seed_strategy
from shardwright.runtime.attention import attend
from shardwright.runtime.capture import capture
from shardwright.runtime.executor import Executor, RunOptions
from shardwright.runtime.local_world import LocalWorld, run_locally
from shardwright.runtime.profile import Setting, measure_operators
from shardwright.runtime.train import named_optimizer
from tests import zoo
from tests.runtime.equivalence import (
    Factory,
    assert_close,
    batches,
    train_plain,
)
from tests.runtime.profile.test_operators import wanted, whole
from tests.runtime.rehearsed import train_rehearsed

GPU = "cuda:0"
pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch can use no GPU here"),
]
ADAMW = named_optimizer("adamw", 1e-3)  # in one kernel
SGD = partial(torch.optim.SGD, lr=1.0)  # updates are gradients
SEEDS = (
    Seed(),
    Seed(num_microbatches=2, recompute=True),
    Seed(data=2, zero=1),
    Seed(data=2, zero=3, num_microbatches=2, recompute=True),
    Seed(tensor=2, sequence=True, recompute=True, num_microbatches=2),
    Seed(stages=2, num_microbatches=4, schedule="1f1b-so"),
    Seed(stages=2, num_microbatches=4, schedule="zb-h1"),
    Seed(stages=2, chunks=2, num_microbatches=4, schedule="zb-v"),
    Seed(data=2, stages=2, zero=3, num_microbatches=2, recompute=True),
)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: seed.label)
def test_plans_train_as_plain_pytorch_does(seed: Seed, streams: bool) -> None:
    expected = train_plain(zoo.gpt, SGD, 0.5)
    module, batch = zoo.gpt()
    captured = capture(module, batch)
    strategy = replace(seed_strategy(captured.graph, seed), clips=True)
    runs, _ = train_rehearsed(captured, strategy, module, batch, SGD, 0.5, streams, device=GPU)
    for run in runs:
        assert_close(run, expected, seed.label, 1e-9)


@pytest.mark.parametrize(
    "factory", [zoo.mlp, zoo.bert, zoo.cnn_groupnorm, zoo.resnet], ids=lambda f: f.__name__
)
def test_other_models_train_as_on_the_cpu(factory: Factory) -> None:
    module, batch = factory()
    captured = capture(module, batch)
    strategy = seed_strategy(captured.graph, Seed(data=2, zero=1))
    given = (captured, strategy, module, batch, SGD)
    (here, *_), _ = train_rehearsed(*given)
    for run in train_rehearsed(*given, device=GPU)[0]:
        assert_close(run, here, factory.__name__, 1e-9)


@pytest.mark.parametrize(
    "compressor", ["top-k", "gtop-k", "gtop-k-tree", "int8", "1-bit", "powersgd"]
)
def test_gradients_are_compressed_as_on_the_cpu(compressor: Compressor) -> None:
    module, batch = zoo.mlp()
    captured = capture(module, batch)
    plain = seed_strategy(captured.graph, Seed(data=2))
    density = 0.1 if "top-k" in compressor else 1.0
    sync = replace(plain.gradient_sync, compressor=compressor, density=density)
    given = (captured, replace(plain, gradient_sync=sync), module, batch, SGD)
    (here, *_), _ = train_rehearsed(*given)
    for run in train_rehearsed(*given, device=GPU)[0]:
        assert_close(run, here, compressor, 1e-9)


@pytest.mark.parametrize(("staleness", "pieces"), [("stash", 1), ("2bw", 2), ("spectrain-v2", 1)])
def test_asynchronous_pipelines_train_as_on_the_cpu(staleness: Any, pieces: int) -> None:
    module, batch = zoo.mlp()
    captured = capture(module, batch)
    strategy = seed_strategy(
        captured.graph, Seed(stages=2, num_microbatches=pieces, staleness=staleness)
    )
    here, there = (losses(captured, strategy, module, batch, device) for device in ("cpu", GPU))
    assert there == pytest.approx(here, rel=1e-9, nan_ok=True)


def losses(
    captured: Any, strategy: Strategy, module: nn.Module, batch: dict[str, Tensor], device: str
) -> list[float]:
    """Return what left a pipeline without a flush, its last minibatches too."""
    program = lower(captured.graph, strategy)

    def train(world: LocalWorld) -> list[float]:
        options = RunOptions(seed=5, world=world, device=device)
        mine = copy.deepcopy(module)
        executor = Executor(captured, program, mine, optimizer=ADAMW, options=options)
        found = [float(executor.step(one)) for one in batches(batch, 6)]
        return [*found, *(float(one.loss) for one in executor.flush())]

    found, _ = run_locally(train, len(strategy.devices))
    return found[-1]


@pytest.mark.parametrize("precision", ["bfloat16", "float16", "fp8", "fp8-row"])
def test_mixed_precision_is_near_float32(precision: Precision) -> None:
    """Products of GPUs are not those of CPUs; what is compared is that training means the same."""
    factory = partial(zoo.gpt, dtype=torch.float32)
    module, batch = factory()
    captured = capture(module, batch, precision=KEPT_AS.get(precision, precision))
    strategy = seed_strategy(captured.graph, Seed(num_microbatches=2, precision=precision))
    runs, _ = train_rehearsed(captured, strategy, module, batch, ADAMW, device=GPU)
    expected = train_plain(factory, ADAMW)
    assert runs[0].losses == pytest.approx(expected.losses, rel=0.05)
    assert runs[0].losses != expected.losses


def on_the_gpu(seed: Seed, factory: Factory = zoo.gpt) -> tuple[Executor, dict[str, Tensor]]:
    module, batch = factory()
    captured = capture(module, batch)
    program = lower(captured.graph, seed_strategy(captured.graph, seed))
    options = RunOptions(seed=5, device=GPU)
    return Executor(captured, program, module, optimizer=ADAMW, options=options), batch


def test_a_run_resumes_to_the_last_bit(tmp_path: Path) -> None:
    deterministic: Callable[[bool], None] = torch.use_deterministic_algorithms
    executor, batch = on_the_gpu(Seed(num_microbatches=2), zoo.mlp)
    deterministic(True)
    try:
        several = batches(batch, 4)
        for one in several[:2]:
            executor.step(one)
        executor.save(tmp_path)
        went_on = [float(executor.step(one)) for one in several[2:]]
        other, _ = on_the_gpu(Seed(num_microbatches=2), zoo.mlp)
        other.load(tmp_path)
        assert [float(other.step(one)) for one in several[2:]] == went_on
    finally:
        deterministic(False)


def test_a_timeline_is_of_the_gpus_own_events() -> None:
    executor, batch = on_the_gpu(Seed(num_microbatches=2))
    executor.step(batch)
    timeline = executor.profile_step(batch)
    seen = ~np.isnan(timeline.start)
    assert seen.any()
    assert (timeline.end[seen] >= timeline.start[seen]).all()
    assert timeline.end[seen].max() <= timeline.step_seconds * (1 + 1e-6) < 60
    held = sum(one.numel() * one.element_size() for one in zoo.gpt()[0].parameters())
    assert timeline.peak_bytes[0] >= 3 * held, "parameters, and AdamW's two moments"


def test_operators_are_measured_on_it() -> None:
    module, batch = zoo.gpt(dtype=torch.float32)
    captured = capture(module, batch)
    setting = Setting(environment="here", device="cuda")
    records = measure_operators(
        captured, wanted(captured.graph, [whole(captured.graph)]), setting, budget_seconds=10.0
    )
    assert len(records) > len(captured.graph.operators) / 2
    assert all(0 <= one.seconds < 1 for one in records)
    assert any(one.seconds > 0 for one in records)


def train_over_nccl(compression: Compression | None) -> list[Tensor]:
    """Train a small model in torch's DistributedDataParallel for some steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 4)).double().to(GPU)
    wrapped = DistributedDataParallel(model, device_ids=[0], bucket_cap_mb=6e-4)  # type: ignore[arg-type]
    if compression is not None:
        hooks.register(wrapped, compression)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.5)
    for step in range(5):
        x = torch.randn(8, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        wrapped(x.to(GPU)).square().mean().backward()
        optimizer.step()
    return [one.detach().cpu() for one in model.parameters()]


def test_hooks_and_buckets_of_plain_data_parallelism_work_over_nccl() -> None:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        expected = train_over_nccl(None)
        lossless = Compression(method="top-k", density=1.0, dense_below=1, dense_steps=0)
        for found, plain in zip(train_over_nccl(lossless), expected, strict=True):
            torch.testing.assert_close(found, plain, rtol=1e-12, atol=1e-12)
        for method in METHODS:
            lossy = Compression(method=method, density=0.5, dense_below=1, dense_steps=0)
            assert all(one.isfinite().all() for one in train_over_nccl(lossy))
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).to(GPU)
        wrapped = wrap(model, torch.randn(8, 64, device=GPU), loss=lambda out: out.square().mean())
        wrapped(torch.randn(8, 64, device=GPU)).sum().backward()
        assert all(one.grad is not None for one in model.parameters())
    finally:
        dist.destroy_process_group()


def test_a_permuted_bias_needs_no_scores_written_out() -> None:
    """T5's, whose gradient is wanted: what backward keeps is less than the scores in 16 bits."""
    shape, scores = (8, 4, 512, 64), 8 * 4 * 512 * 512
    given = [torch.randn(shape, requires_grad=True) for _ in range(3)]
    table = torch.randn(512, 512, 4, requires_grad=True)
    there = [one.detach().to(GPU, torch.bfloat16).requires_grad_() for one in (*given, table)]
    before = torch.cuda.memory_allocated()
    found = attend(*there[:3], there[3].permute(2, 0, 1).unsqueeze(0), 0.1)
    assert torch.cuda.memory_allocated() - before < 2 * scores
    found = attend(*there[:3], there[3].permute(2, 0, 1).unsqueeze(0))
    expected = attend(*given, table.permute(2, 0, 1).unsqueeze(0))
    (slope,) = torch.autograd.grad(found.sum(), there[3])
    (wanted,) = torch.autograd.grad(expected.sum(), table)
    torch.testing.assert_close(found.float().cpu(), expected, rtol=0.05, atol=0.02)
    torch.testing.assert_close(slope.float().cpu(), wanted, rtol=0.1, atol=0.05)
