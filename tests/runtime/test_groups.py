"""ZeRO within groups trains as plain PyTorch; links share process groups."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist

from shardwright.planner.lower import lower
from shardwright.planner.space.seeds import Seed, seed_strategy
from shardwright.runtime.capture import capture
from shardwright.runtime.local_world import LocalWorld, _Shared
from shardwright.runtime.messages import Groups
from shardwright.runtime.world import Channel, Lanes, Link, TorchLink, TorchWorld
from tests import zoo
from tests.runtime.equivalence import assert_close, captured_of, train_plain
from tests.runtime.rehearsed import train_rehearsed

ADAM = partial(torch.optim.AdamW, lr=1e-2)
MODEL = partial(zoo.mlp, batch=24, width=12, depth=2)


@pytest.mark.torch
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_groups_that_each_hold_all_of_the_state_stay_equal(zero: int) -> None:
    module, batch, captured = captured_of(MODEL)
    seed = Seed(data=2, group=2, zero=zero, num_microbatches=2)
    strategy = replace(seed_strategy(captured.graph, seed), clips=True)
    runs, _ = train_rehearsed(captured, strategy, module, batch, ADAM, 0.1)
    for run in runs:
        assert_close(run, train_plain(MODEL, ADAM, 0.1), seed.label)


class Asking(LocalWorld):
    """Notes the links that a rank asks for."""

    def __init__(self, size: int) -> None:
        super().__init__(_Shared(size), 0)
        self.links: list[tuple[int, int, Channel]] = []

    def link(self, source: int, destination: int, channel: Channel = (0, 0)) -> Link:
        """Note it."""
        self.links.append((source, destination, channel))
        return super().link(source, destination, channel)


def lanes_of(seed: Seed) -> tuple[int, int]:
    """Return how many links a plan's Program has, and how many lanes they share."""
    captured = capture(*zoo.gpt())
    program = lower(captured.graph, seed_strategy(captured.graph, seed))
    devices = program.strategy.devices
    world = Asking(len(devices))
    Groups(program, {device: rank for rank, device in enumerate(devices)}, world)
    links, lanes = world.links, Lanes()
    used = {
        (lanes.of((a, b), channel), frozenset((a, b))): (a, b, channel) for a, b, channel in links
    }
    assert len(used) == len(set(links))  # in a lane two ranks have one link between them
    return len(used), len({lane for lane, _ in used})


@pytest.mark.torch
def test_links_of_a_pipeline_share_two_lanes_however_long_and_wide_it_is() -> None:
    short = lanes_of(Seed(stages=2, num_microbatches=2))
    long = lanes_of(Seed(stages=4, data=2, num_microbatches=4))
    assert (short, long) == ((2, 2), (12, 2))


def test_ranks_that_meet_on_several_channels_have_a_lane_for_each() -> None:
    lanes = Lanes()
    asked = [((0, 1), (0, 1)), ((1, 0), (1, 0)), ((0, 1), (2, 3)), ((0, 1), (0, 1))]
    assert [lanes.of(*one) for one in asked] == [(True, 0), (False, 0), (True, 1), (True, 0)]


@pytest.mark.torch
def test_with_gloo_the_two_ways_between_ranks_have_a_connection_each() -> None:
    """What a rank asks for is not kept waiting by what it sends."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        world = TorchWorld()
        links = [world.link(*ends) for ends in ((0, 1), (1, 0), (2, 0))]
        there, back, other = [one.group for one in links if isinstance(one, TorchLink)]
        assert there is dist.group.WORLD is not back is other
        world.close()
    finally:
        dist.destroy_process_group()
