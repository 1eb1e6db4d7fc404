"""Planned buckets of DistributedDataParallel: made by torch as planned, kept only where not slower."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from shardwright.ddp import BucketChoice, BucketPlan, choose_buckets, plan_buckets, wrap
from shardwright.ddp.buckets import default_buckets
from shardwright.ddp.measure import measure_all_reduce, measure_backward, measure_messages
from shardwright.errors import InputError, RunError, ShardwrightWarning
from shardwright.planner.schedule import finish_time, merge_gradients
from tests.runtime.world import run_ranks

pytestmark = pytest.mark.ranks
WIDTHS = (24, 40, 56, 32, 8)


class Layers(nn.Module):
    """Linear layers of many sizes, a buffer that forward changes, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        pairs = itertools.pairwise(WIDTHS)
        self.layers = nn.Sequential(*(nn.Linear(a, b, bias=b != 8) for a, b in pairs))
        self.norm = nn.BatchNorm1d(WIDTHS[0], affine=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.layers(F.dropout(self.norm(x), 0.1)), y)


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(16, WIDTHS[0], generator=generator)
    return {"x": x, "y": torch.randint(0, 8, (16,), generator=generator)}


def measured_plan() -> dict[str, Any]:
    module, group = Layers(), dist.group.WORLD
    before = [one.clone() for one in module.norm.buffers()]
    random = torch.get_rng_state()
    plan = plan_buckets(module, batch(), steps=2)
    same = torch.equal(random, torch.get_rng_state())
    same &= all(map(torch.equal, before, module.norm.buffers()))
    assert group is not None
    measured = measure_backward(module, batch(), None, group, 2)
    cost = measure_all_reduce(sum(measured.sizes_bytes), group, torch.device("cpu"))
    same &= all(one.grad is None for one in module.parameters())
    ready, sizes = measured.ready_seconds, measured.sizes_bytes
    count = len(sizes)
    finishes = [
        finish_time(cut_at(edges, count), ready, sizes, cost)
        for number in range(count)
        for edges in itertools.combinations(range(1, count), number)
    ]
    best = merge_gradients(ready, sizes, cost)
    return {
        "plan": plan, "same": same, "measured": measured,
        "gap": finish_time(best, ready, sizes, cost) / min(finishes),
        "cost": cost(np.array([0.0, 4096.0, 8192.0, 1e6])).tolist(),
    }  # fmt: skip


def cut_at(edges: tuple[int, ...], count: int) -> tuple[tuple[int, ...], ...]:
    ends = (0, *edges, count)
    return tuple(tuple(range(a, b)) for a, b in itertools.pairwise(ends))


def test_a_plan_is_equal_on_all_ranks_and_the_best_of_all_groupings() -> None:
    results = run_ranks(2, measured_plan)
    plans = [one["plan"] for one in results]
    assert plans[0] == plans[1]
    for one in results:
        assert one["same"]
        assert one["gap"] == pytest.approx(1.0, rel=1e-12)
        assert all(seconds > 0 for seconds in one["cost"])
    measured = results[0]["measured"]
    # Seven gradients, last layer first, all of them once.
    assert measured.names[0] == "layers.3.weight"
    assert {name for names in plans[0].names for name in names} == set(measured.names)
    named = dict(zip(measured.names, measured.sizes_bytes, strict=True))
    assert plans[0].sizes_bytes == tuple(sum(map(named.get, names)) for names in plans[0].names)
    assert list(measured.ready_seconds) == sorted(measured.ready_seconds)


def kept_and_refused() -> list[tuple[str, Any]]:
    """Force buckets and outcomes, and see what torch makes of them."""
    found = choose_buckets(Layers(), batch(), turns=2)
    plan = found.plan
    order = [name for names in plan.names for name in names]
    sizes = {name: 4 * one.numel() for name, one in Layers().named_parameters()}
    groups = [order[:1], order[1:4], order[4:]]
    forced = replace(
        plan, names=tuple(map(tuple, groups)),
        sizes_bytes=tuple(sum(sizes[name] for name in names) for names in groups),
    )  # fmt: skip
    results: list[tuple[str, Any]] = [("rebuilt", found.is_rebuilt)]
    for seconds in (1.0, 3.0):
        choice = BucketChoice(plan=forced, seconds=seconds, default_seconds=2.0, is_rebuilt=True)
        wrapped = wrap(Layers(), batch(), choice=choice)
        for _ in range(3):
            wrapped.zero_grad()
            wrapped(**batch()).backward()
        made = wrapped._get_ddp_logging_data()["rebuilt_bucket_sizes"]
        results.append((made, forced.sizes_bytes))
    other = BucketChoice(plan=forced, seconds=1.0, default_seconds=2.0, is_rebuilt=False)
    with pytest.warns(ShardwrightWarning, match="other buckets"):
        wrap(Layers(), batch(), choice=other)
    return results


def test_torch_makes_the_planned_buckets_and_slower_ones_are_not_kept() -> None:
    for rebuilt, kept, refused in run_ranks(2, kept_and_refused):
        assert rebuilt == ("rebuilt", True)
        assert tuple(map(int, kept[0].split(","))) == kept[1]
        assert [int(one) for one in refused[0].split(",")] == [sum(refused[1])]


def train(wrapped: nn.Module) -> list[Tensor]:
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    torch.manual_seed(7)
    for _ in range(4):
        optimizer.zero_grad()
        wrapped(**batch()).backward()
        optimizer.step()
    return [one.detach() for one in wrapped.parameters()]


def train_both_ways() -> tuple[list[Tensor], list[Tensor]]:
    plain = nn.parallel.DistributedDataParallel(Layers())
    return train(wrap(Layers(), batch())), train(plain)


def test_a_wrapped_model_trains_as_ever() -> None:
    for planned, plain in run_ranks(2, train_both_ways):
        assert all(map(torch.equal, planned, plain))  # sums of two ranks have one order


class Remembering(Layers):
    """A model that keeps its activations, makes a buffer in its first step and lengthens another in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", None)
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.ones(WIDTHS[0])
        self.seen = torch.cat([self.seen, torch.ones(1)])
        self.last = self.layers(self.norm(x) * self.mask)
        return F.cross_entropy(self.last, y)


def left_behind() -> dict[str, Any]:
    module, spoilt = Remembering(), Unused()
    choice = choose_buckets(module, batch(), turns=1)
    for one in spoilt.parameters():
        one.grad = torch.ones_like(one)
    before = [one.clone() for one in spoilt.buffers()]
    with pytest.raises(InputError, match="spare"):
        plan_buckets(spoilt, batch(), steps=1)
    with pytest.raises(ValueError, match="batch_size"):
        plan_buckets(spoilt, batch() | {"x": torch.zeros(2, WIDTHS[0])}, steps=1)
    return {
        "names": sorted(itertools.chain.from_iterable(choice.plan.names)),
        "buffers": (module.mask, len(module.seen)),
        "same": all(map(torch.equal, before, spoilt.buffers())),
        "kept": all(bool((one.grad == 1).all()) for one in spoilt.parameters()),
    }


def test_models_are_as_they_were_whatever_a_step_makes_of_them() -> None:
    for found in run_ranks(2, left_behind):
        assert found["names"] == sorted(name for name, _ in Remembering().named_parameters())
        assert found["buffers"] == (None, 0)
        assert found["same"]
        assert found["kept"]


def slow_link() -> list[float]:
    """Time messages that take what is known."""
    group = dist.group.WORLD
    assert group is not None
    slow = measure_messages(lambda size: time.sleep(0.002 + size * 2e-8), 10**5, group, torch.device("cpu"))  # fmt: skip
    return slow(np.array([1e4, 1e5, 2e5])).tolist()


def test_measured_messages_take_at_least_what_they_take() -> None:
    first, second = run_ranks(2, slow_link)
    assert first == second
    assert all(found >= 0.002 + size * 2e-8 for found, size in zip(first, (1e4, 1e5)))


def test_default_buckets_are_those_of_torch() -> None:
    half = 2**19
    assert default_buckets((half, half, half)) == ((0, 1), (2,))
    assert default_buckets((10 * half,) + (25 * half,) * 4) == ((0,), (1, 2), (3, 4))
    assert default_buckets((5,)) == ((0,),)


class Unused(Layers):
    """With a parameter that no loss needs."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.zeros(3))


def refused() -> None:
    with pytest.raises(InputError, match="spare"):
        plan_buckets(Unused(), batch(), steps=1)
    with pytest.raises(InputError, match="steps=0"):
        plan_buckets(nn.Linear(24, 2), batch()["x"], steps=0)
    x, plain = batch()["x"], nn.Linear(24, 2)
    with pytest.raises(InputError, match=r"steps=2\.5"):
        plan_buckets(plain, x, steps=2.5)  # type: ignore[arg-type]
    for loss, said in (
        (None, r"model returns a tensor of shape \(16, 2\); give loss="),
        (nn.Identity(), r"loss= returns a tensor of shape \(16, 2\)"),
        (lambda found: found.sum().detach(), r"shape \(\) that needs no gradient"),
        (len, "loss= returns int"),
        (5, "not of Linear and 5"),
    ):
        with pytest.raises(InputError, match=said):
            plan_buckets(plain, x, steps=1, loss=loss)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="not of str"):
        plan_buckets("model", x, steps=1)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="meta device"):
        plan_buckets(nn.Linear(24, 2, device="meta"), x, steps=1)
    mixed = nn.Sequential(nn.Linear(24, 2), nn.Linear(2, 2).double())
    sharded, kept = nn.Linear(24, 2), nn.Linear(24, 2)
    fully_shard(sharded)
    kept.output = kept(x)
    for wrong, said in (
        (mixed, "one dtype.* use the default buckets"),
        (nn.Linear(24, 2).requires_grad_(False), "trains nothing; set requires_grad"),
        (sharded, "is sharded"),
        (nn.Sequential(nn.Linear(24, 2), nn.LazyBatchNorm1d()), "without a shape yet"),
        (nn.parallel.DistributedDataParallel(nn.Linear(24, 2)), "wrapped already"),
        (kept, "cannot be copied"),
    ):
        with pytest.raises(InputError, match=said):
            choose_buckets(wrong, x, loss=torch.sum, turns=1)
    plan = BucketPlan(
        sizes_bytes=(200,),
        names=(("weight", "bias"),),
        finish_seconds=1.0,
        default_finish_seconds=1.0,
    )
    choice = BucketChoice(plan=plan, seconds=1.0, default_seconds=2.0, is_rebuilt=True)
    with pytest.raises(InputError, match=r"2 gradients of 200 bytes, but this one has 2 of 108"):
        wrap(nn.Linear(26, 1), x, choice=choice)
    with pytest.raises(InputError, match="not by BucketPlan"):
        wrap(plain, x, choice=plan)  # type: ignore[arg-type]
    raise RuntimeError("all refused")


def test_models_that_cannot_be_bucketed_are_refused() -> None:
    with pytest.raises(RunError, match="all refused"):
        run_ranks(2, refused)
    with pytest.raises(InputError, match="init_process_group"):
        plan_buckets(Layers(), {})
