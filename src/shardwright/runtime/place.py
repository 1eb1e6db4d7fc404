"""Which torch device a rank trains on, from what the plan says and what the machine has."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from shardwright.errors import InputError
from shardwright.runtime.cores import RANK, RANKS


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What a rank finds around it.

    ``gpus`` that torch can use in this process; ``is_given_one``: what started the rank showed it the
    one GPU that is its own. ``local_rank`` of so many ``local_ranks`` on the host.
    """

    gpus: int
    local_rank: int = 0
    local_ranks: int = 1
    is_given_one: bool = False

    @property
    def gpu(self) -> int:
        """The GPU of this rank, -1 where there is none for it."""
        if self.is_given_one and self.gpus == 1:
            return 0
        return self.local_rank if self.local_rank < self.gpus else -1

    @property
    def has_gpus_for_all(self) -> bool:
        """Whether every rank of the host has a GPU of its own, as far as this one can see."""
        return self.gpu >= 0 and (self.is_given_one or self.local_ranks <= self.gpus)


def this_host(environment: Mapping[str, str] = os.environ) -> Host:
    """Look around, by the words of the launcher or torchrun."""
    shown = environment.get("CUDA_VISIBLE_DEVICES", "")
    return Host(
        gpus=torch.cuda.device_count() if torch.cuda.is_available() else 0,
        local_rank=int(environment.get(RANK, "0")),
        local_ranks=int(environment.get(RANKS, environment.get("WORLD_SIZE", "1"))),
        is_given_one=bool(shown) and "," not in shown,
    )


def device_of(asked: str, planned: str, host: Host) -> str:
    """Return the device of a rank: the one it asks for, else its own of the plan's type.

    ``asked`` and ``planned`` ("cpu", "cuda") are empty where nobody said: then a rank takes a GPU where
    each of its host has one. Raises InputError where ranks outnumber GPUs, or none can be used.
    """
    if asked and asked != "cuda":
        return asked
    if not asked and planned == "cpu":
        return "cpu"
    wanted = asked or planned
    if host.has_gpus_for_all:
        return f"cuda:{host.gpu}"
    if not wanted:
        return "cpu"
    if host.gpus:
        raise InputError(
            f"each rank needs a GPU of its own, but this host has {host.gpus} that torch can use and "
            f"{host.local_ranks} ranks (this is {host.local_rank}); start at most {host.gpus} here, or "
            "train on the CPU: RunOptions(device='cpu'), and join_world(device='cpu') before"
        )
    if asked:
        raise InputError(
            f"device {asked!r} needs a GPU, but torch can use none on this host; mend the driver, "
            "CUDA_VISIBLE_DEVICES or torch's build, or leave the device out"
        )
    return "cpu"


def is_stranger(asked: str, planned: str, device: str) -> bool:
    """Whether a rank trains on another type of device than was planned without having been told so."""
    return not asked and planned not in ("", device.partition(":")[0])


def check_world(device: str, backend: str) -> None:
    """Refuse a process group that cannot carry the tensors of a device. ``backend`` is torch's name of
    it, empty where there is no group."""
    speaks_nccl, speaks_gloo = "nccl" in backend, "gloo" in backend
    if device.startswith("cpu") and speaks_nccl and not speaks_gloo:
        raise InputError(
            f"this rank trains on the CPU, but its process group talks by {backend}, which takes only "
            "tensors of GPUs; begin with join_world(device='cpu')"
        )
    if device.startswith("cuda") and speaks_gloo and not speaks_nccl:
        raise InputError(
            f"this rank trains on {device}, but its process group talks by {backend}, which goes "
            "through the host's memory; begin with join_world() or init_process_group('nccl'), or "
            "train on the CPU: RunOptions(device='cpu')"
        )


def choose(asked: torch.device | str | None = None, planned: str = "") -> str:
    """Return this rank's device, and warn where it is not of the type that was planned for."""
    wish = "" if asked is None else str(asked)
    device = device_of(wish, planned, this_host())
    if is_stranger(wish, planned, device):
        warnings.warn(
            f"the plan is for {planned} devices, but torch can use none here: this rank trains on "
            f"{device}, slower than predicted and in other memory. Plan for this machine (--cluster "
            f"local), or say RunOptions(device={device!r}) where that is meant",
            RuntimeWarning,
            stacklevel=4,
        )
    return device


def stand_on(device: str) -> None:
    """Make a device the current one, in the world that is joined."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        check_world(device, dist.get_backend())
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
