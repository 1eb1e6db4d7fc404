"""Which device a rank trains on: a table of what is asked, planned and there."""

from __future__ import annotations

import os

import pytest
import torch

from shardwright.errors import InputError
from shardwright.runtime.launch import join_world
from shardwright.runtime.place import (
    Host,
    check_world,
    choose,
    device_of,
    is_stranger,
    stand_on,
    this_host,
)

pytestmark = pytest.mark.torch
NONE = Host(gpus=0)
FOUR = Host(gpus=4, local_rank=2, local_ranks=4)
OWN = Host(gpus=1, local_rank=2, local_ranks=4, is_given_one=True)
CROWDED = Host(gpus=2, local_rank=1, local_ranks=4)


@pytest.mark.parametrize(
    ("asked", "planned", "host", "expected"),
    [
        ("", "cuda", FOUR, "cuda:2"),
        ("", "cuda", OWN, "cuda:0"),
        ("", "cuda", NONE, "cpu"),
        ("", "cpu", FOUR, "cpu"),
        ("", "", FOUR, "cuda:2"),
        ("", "", NONE, "cpu"),
        ("", "", CROWDED, "cpu"),
        ("cpu", "cuda", FOUR, "cpu"),
        ("cuda", "cpu", FOUR, "cuda:2"),
        ("cuda:1", "cuda", FOUR, "cuda:1"),
        ("cuda:1", "cuda", CROWDED, "cuda:1"),
    ],
)
def test_a_rank_takes_its_own_device_of_the_type_that_is_planned(
    asked: str, planned: str, host: Host, expected: str
) -> None:
    assert device_of(asked, planned, host) == expected


def test_ranks_that_outnumber_gpus_are_refused_alike() -> None:
    for local_rank in range(4):
        crowded = Host(gpus=2, local_rank=local_rank, local_ranks=4)
        with pytest.raises(InputError, match=rf"has 2 .* and 4 ranks \(this is {local_rank}\)"):
            device_of("", "cuda", crowded)
        assert device_of("", "", crowded) == "cpu"  # so nobody waits for another backend's ranks
    with pytest.raises(InputError, match="device 'cuda' needs a GPU"):
        device_of("cuda", "", NONE)


def test_only_who_was_not_told_is_warned() -> None:
    assert is_stranger("", "cuda", "cpu")
    assert not is_stranger("cpu", "cuda", "cpu")
    assert not is_stranger("", "", "cpu")
    assert not is_stranger("", "cuda", "cuda:3")


def test_a_process_group_carries_its_own_devices_tensors_only() -> None:
    for device, backend in (
        ("cpu", "gloo"), ("cuda:0", "nccl"), ("cpu", "cpu:gloo,cuda:nccl"),
        ("cuda:0", "cpu:gloo,cuda:nccl"), ("cpu", ""), ("cuda:1", ""),
    ):  # fmt: skip
        check_world(device, backend)
    with pytest.raises(InputError, match=r"join_world\(device='cpu'\)"):
        check_world("cpu", "nccl")
    with pytest.raises(InputError, match=r"init_process_group\('nccl'\)"):
        check_world("cuda:0", "gloo")


def test_the_host_is_described_by_the_launchers_words() -> None:
    words = {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "16"}
    host = this_host(words)
    assert (host.local_rank, host.local_ranks, host.is_given_one) == (3, 8, False)
    assert host.gpus == torch.cuda.device_count()
    assert this_host(words | {"CUDA_VISIBLE_DEVICES": "5"}).is_given_one
    assert not this_host(words | {"CUDA_VISIBLE_DEVICES": "4,5"}).is_given_one


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch can use a GPU here")
def test_a_plan_for_gpus_warns_where_there_are_none() -> None:
    assert "LOCAL_RANK" not in os.environ
    with pytest.warns(RuntimeWarning, match="the plan is for cuda devices, but torch can use none"):
        assert choose(None, "cuda") == "cpu"
    assert choose("cpu", "cuda") == choose(None, "") == "cpu"
    with pytest.raises(InputError, match="device 'cuda' needs a GPU"):
        choose("cuda", "")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch can use no GPU here")
def test_a_rank_makes_its_gpu_the_current_one() -> None:
    stand_on(choose(None, "cuda"))
    assert choose(None, "cuda") == f"cuda:{torch.cuda.current_device()}"
    assert join_world() == (0, 1)
