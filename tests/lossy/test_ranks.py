"""Gradients over real UDP sockets beside gloo: sums, plain DDP with a hook, forged packets, dying."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardwright import lossy
from shardwright.errors import InputError, RunError
from shardwright.lossy import Sums, Tolerance, Transport
from shardwright.lossy.batches import Sockets
from shardwright.lossy.packets import blank
from tests.runtime.world import run_ranks

pytestmark = pytest.mark.ranks
HERE = "127.0.0.1"
STEPS = 4
BATCH = 16


def test_packets_bear_their_labels_and_come_from_all_ports() -> None:
    sockets = Sockets(HERE, 3, 256)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.bind((HERE, 0))
        other.settimeout(10)
        sockets.know([other.getsockname(), sockets.address])
        packets = blank(150, 256)
        packets.tos[:] = [0xE2, 0x20, 0x02] * 50
        packets.rows[:, 8], packets.to[:] = np.arange(150), 1
        assert sockets.send(packets) == 150
        for came in iter(sockets.receive, None):
            assert np.array_equal(came.tos, packets.tos[came.rows[:, 8]])
        packets.to[:] = 0
        sockets.send(packets)
        assert len({other.recvfrom(256)[1] for _ in range(150)}) == 3
    sockets.close()


def drawn(rank: int) -> np.ndarray:
    return np.random.default_rng(rank).standard_normal(30_000).astype(np.float32)


def joined(**options: Any) -> lossy.UdpRank:
    return lossy.join(dist.group.WORLD, Transport(timeout=20), host=HERE, **options)  # type: ignore[arg-type]


def sum_both_ways() -> tuple[np.ndarray, np.ndarray]:
    """Also with somebody who sends to this rank's port what is no packet."""
    rank = joined(dropper=lossy.seeded_dropper(0.05, dist.get_rank()))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for length in (0, 1, 48, 1448, 2000):
            stranger.sendto(bytes(length), rank.address)
    flat = drawn(rank.rank)
    rank.drive(Sums(rank, Tolerance(push=0)).sum(flat))
    rank.close()
    theirs = torch.from_numpy(drawn(rank.rank))
    dist.all_reduce(theirs)
    return flat, theirs.numpy()


@pytest.mark.parametrize("ranks", [2, 4])
def test_with_nothing_allowed_to_be_lost_sums_are_gloos_or_those_in_rank_order(ranks: int) -> None:
    results = run_ranks(ranks, sum_both_ways)
    expected = drawn(0)
    for one in range(1, ranks):
        expected = expected + drawn(one)
    for mine, theirs in results:
        assert np.array_equal(mine, expected)
        if ranks == 2:  # with more, gloo adds along its ring
            assert np.array_equal(mine, theirs)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(20, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 2)
    )


def train(wrapped: nn.Module, rank: int) -> list[Tensor]:
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for step in range(STEPS):
        numbers = torch.Generator().manual_seed(10 * step + rank)
        optimizer.zero_grad()
        wrapped(torch.randn(BATCH, 20, generator=numbers)).square().mean().backward()
        optimizer.step()
    return [one.detach().clone() for one in wrapped.parameters()]


def parallel() -> DistributedDataParallel:
    return DistributedDataParallel(model(), bucket_cap_mb=0.2)  # type: ignore[arg-type]


def train_with(tolerance: Tolerance, share: float) -> tuple[list[Tensor], dict[str, Tensor], float]:
    wrapped = parallel()
    network = lossy.register(
        wrapped, tolerance, Transport(packet_bytes=512, timeout=20), host=HERE,
        dropper=lossy.seeded_dropper(share, dist.get_rank()),
    )  # fmt: skip
    weights = train(wrapped, dist.get_rank())
    state = network.state_dict()
    network.load_state_dict(state)
    network.close()
    return weights, state, network.lost_share


def train_all_ways() -> dict[str, Any]:
    plain = train(parallel(), dist.get_rank())
    exact = train_with(Tolerance(push=0), 0.05)
    return {"plain": plain, "exact": exact, "lossy": train_with(Tolerance(push=0.1), 0.05)}


def test_plain_ddp_trains_over_udp_exactly_or_with_losses_that_are_owed() -> None:
    found = run_ranks(2, train_all_ways)
    for one in found:
        assert all(map(torch.equal, one["exact"][0], one["plain"]))
        assert not one["exact"][1]
        assert all(map(torch.equal, one["lossy"][0], found[0]["lossy"][0]))
        assert 0 < one["lossy"][2] <= 0.1
    owing = {name for one in found for name in one["lossy"][1]}
    assert owing <= {name for name, _ in model().named_parameters()}
    assert owing


def refuse() -> None:
    wrapped, mine = parallel(), dist.get_rank()
    with pytest.raises(InputError, match=r"push is 0\.1 on rank 0 and 0\.2 on rank 1"):
        lossy.register(wrapped, Tolerance(push=0.2 if mine else 0.1), host=HERE)
    with pytest.raises(InputError, match="and 'fast'"):
        lossy.register(wrapped, Tolerance(), "fast", host=HERE)  # type: ignore[arg-type]
    # The first is kept for documents: nobody's. Others are everybody's, or no address.
    for host in ("192.0.2.1", "0.0.0.0", "224.0.0.1", "255.255.255.255", 5):
        with pytest.raises(InputError, match=f"host='?{host}'? is none"):
            lossy.register(wrapped, Tolerance(), host=host)  # type: ignore[arg-type]
    network = lossy.register(wrapped, Tolerance(push=0.1), Transport(timeout=20), host=HERE)
    with pytest.raises(InputError, match=r"no 0\.bias of 3 values"):
        network.load_state_dict({"0.bias": torch.zeros(3)})
    train(wrapped, mine)
    network.close()
    network.close()
    network.load_state_dict(network.state_dict())
    with pytest.raises(InputError, match="close it behind the last step"):
        train(wrapped, mine)
    rows = DistributedDataParallel(nn.Embedding(9, 4, sparse=True))
    network = lossy.register(rows, Tolerance(), Transport(timeout=20), host=HERE)
    with pytest.raises(InputError, match="rows of"):
        rows(torch.tensor([1, 2])).sum().backward()
    network.close()


def test_settings_that_differ_hosts_of_others_and_closed_networks_are_refused() -> None:
    run_ranks(2, refuse, timeout=40)


def refuse_on_one() -> str:
    mine = dist.get_rank()
    with pytest.raises(InputError) as refused:
        lossy.register(parallel(), Tolerance(), host="192.0.2.1" if mine else HERE)
    dist.barrier()  # nobody is left in the middle of a message
    return str(refused.value)


def test_all_ranks_learn_that_one_has_a_host_of_others() -> None:
    first, second = run_ranks(2, refuse_on_one, timeout=40)
    assert second.startswith("packets come to an IPv4 address of this host, but host='192.0.2.1'")
    assert first == f"rank 1 cannot be reached, and rank 0 ends with it: {second}"


def wait_for_the_dead() -> str:
    rank = lossy.join(dist.group.WORLD, Transport(timeout=2), host=HERE)  # type: ignore[arg-type]
    if rank.rank == 1:
        rank.abandon()
        return ""
    try:
        rank.drive(Sums(rank, Tolerance()).sum(drawn(0)))
    except RunError as error:
        rank.close()
        return str(error)
    return "nothing was raised"


def test_a_rank_that_is_gone_is_named_after_the_timeout() -> None:
    said, _ = run_ranks(2, wait_for_the_dead)
    # Whichever is noticed first: that nothing comes, or that nobody confirms.
    ends = ("rank 0 has got 0 of", "rank 1 has not confirmed")
    assert said.startswith(tuple(f"messages must be through within 2 s, but {end}" for end in ends))
    assert "rank 1" in said


def test_other_models_unknown_bounds_and_no_address_are_refused() -> None:
    with pytest.raises(InputError, match="wrap the model in it first"):
        lossy.register(model(), Tolerance())  # type: ignore[arg-type]
    with contextlib.ExitStack() as stack:
        known = os.environ.pop("MASTER_ADDR", None)
        if known is not None:
            stack.callback(os.environ.__setitem__, "MASTER_ADDR", known)
        with pytest.raises(InputError, match="pass host="):
            lossy.own_address()
