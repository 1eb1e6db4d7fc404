"""What compressing takes is measured for every piece of work that plans have, and plans are priced by it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shardwright.core.costs import PACK
from shardwright.core.program import Kind
from shardwright.core.strategy import Compressor, Feedback, GradientSync
from shardwright.files.clusterfile import read_cluster
from shardwright.planner.cost.price import price
from shardwright.planner.lower import lower
from shardwright.planner.space import Seed, seed_strategy
from shardwright.runtime.profile import overheads
from shardwright.runtime.profile.collectives import name_records
from shardwright.verbs.records import build_costs
from tests.planner.search.models import residual

pytestmark = pytest.mark.torch
CPUS = read_cluster(
    '[kind.core]\npeak = {float32 = "0.1 TFLOP/s"}\nmemory = "1 GB"\nmemory_bandwidth = "10 GB/s"\nbackend = "cpu"\n'
    '[[host]]\nkind = "core"\ndevices = 4\nlink = "5 GB/s"\n'
)
WAYS: tuple[tuple[Compressor, Feedback], ...] = (
    ("top-k", Feedback()), ("int8", Feedback()), ("1-bit", Feedback()), ("gtop-k", Feedback()),
    ("gtop-k", Feedback(residual="paper")), ("powersgd", Feedback(rank=2)),
)  # fmt: skip


def test_what_is_timed_of_a_merge_is_a_merge() -> None:
    runs = dict(overheads._merging(4096))
    kept, left, residual = runs["merge"]()
    places, own = (
        one.clone().view(kind)
        for one, kind in ((kept[4 * 41 :], torch.int32), (left[: 4 * 41], torch.float32))
    )
    assert len(places.unique()) == 41
    # Of 82 places 41 stay: what of them is this rank's own, and what it owes of the others, are its 41.
    owed = int((residual != 0).sum())
    assert 0 < owed < 41
    assert int((own != 0).sum()) == 41 - owed
    assert len(runs["take back"]()) == 1


def test_every_transform_that_compresses_is_priced_as_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(overheads, "_PACK_SECONDS", 0.0)
    found = overheads._pack_seconds(overheads.Others())
    assert all(one.seconds >= 0 and name.startswith(PACK) for name, one in found.items())
    seconds = {name: replace(one, seconds=1.0) for name, one in found.items()}
    table = build_costs(name_records(seconds, 1, 4, "here", "here"), "here")
    graph = residual(batch=8, width=64, depth=1)
    plain, seen = seed_strategy(graph, Seed(data=4)), set[str]()
    for compressor, feedback in WAYS:
        density = 0.01 if "top-k" in compressor else 1.0
        sync = GradientSync(compressor=compressor, density=density, feedback=feedback)
        program = lower(graph, replace(plain, gradient_sync=sync))
        prices = price(program, graph, CPUS, table)
        for index in range(program.num_instructions):
            if program.kind[index] == Kind.TRANSFORM:
                seen.add(program.transforms[program.item[index]].name)
                assert prices.seconds[index] >= 1.0
    assert seen == {name.split("|")[1] for name in found} - {"rank", "zeros"}
