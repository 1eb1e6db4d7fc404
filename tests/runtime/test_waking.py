"""Threads of ranks on CPUs interrupt no other where they are woken."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwright import ddp
from shardwright.runtime.launch import launch
from shardwright.runtime.world import TorchWorld

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="a policy of Linux's")

FOUND = """
import os, threading
from shardwright.runtime.waking import wait_when_woken

{before}
waiting = threading.Event()
thread = threading.Thread(target=waiting.wait)
thread.start()
print(wait_when_woken(), os.sched_getscheduler(0), os.sched_getscheduler(thread.native_id))
waiting.set()
"""


def found(before: str = "") -> list[str]:
    """Return what a process says that it did, and the policies of its first thread and of another one."""
    command = [sys.executable, "-c", FOUND.format(before=before)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return ran.stdout.split()


def policies() -> set[int]:
    """Return the policies of this process's threads."""
    dist.all_reduce(torch.ones(1))  # so that gloo has begun its own
    return {os.sched_getscheduler(int(one)) for one in os.listdir("/proc/self/task")}


def begin_anew() -> None:
    """Let all threads of this process be as others are."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setscheduler(int(thread), os.SCHED_OTHER, os.sched_param(0))


def in_a_world_of_the_users_own() -> set[int]:
    begin_anew()
    TorchWorld()
    return policies()


def with_a_hook() -> set[int]:
    begin_anew()
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    ddp.hooks.register(model, ddp.Compression(method="top-k"))
    return policies()


def wrapped() -> set[int]:
    begin_anew()
    ddp.wrap(nn.Sequential(nn.Linear(2, 2), nn.Flatten(0)), torch.ones(1, 2), loss=torch.sum)
    return policies()


def test_threads_that_are_there_wait_as_well():
    assert found() == ["True", str(os.SCHED_BATCH), str(os.SCHED_BATCH)]


def test_a_policy_that_the_user_has_set_stays():
    idle = "os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))"
    assert found(before=idle) == ["False", str(os.SCHED_IDLE), str(os.SCHED_IDLE)]


@pytest.mark.ranks
@pytest.mark.parametrize(
    "body",
    [policies, in_a_world_of_the_users_own, with_a_hook, wrapped],
    ids=lambda one: one.__name__,
)
def test_all_threads_of_a_rank_wait_those_of_gloo_too(body):
    assert launch(body, 2, timeout=60) == [{os.SCHED_BATCH}] * 2
