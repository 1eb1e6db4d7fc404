"""A communication hook of torch's DistributedDataParallel over a network that may lose packets.

Buckets wait in one queue and one thread sums them, one behind the other, in the order in which
DistributedDataParallel hands them over, which is the same on all ranks.
"""

# Annotations stay types, not texts: torch looks at those of a hook.
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from shardwright.errors import InputError
from shardwright.lossy.collectives import Parts, Sums
from shardwright.lossy.labels import PRIORITIES
from shardwright.lossy.settings import Tolerance, Transport
from shardwright.lossy.udp import Dropper, UdpRank
from shardwright.runtime.agreement import check_alike
from shardwright.runtime.handing import averaged_beside


class Lossy:
    """What keeps a model's network and what was lost; ``close`` it on all ranks before the process ends."""

    def __init__(
        self, rank: UdpRank, tolerance: Tolerance, names: dict[int, str], sizes: dict[str, int]
    ) -> None:
        self.rank = rank
        self._sizes = sizes
        self.sums = Sums(rank, tolerance)
        self._names = names
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lossy gradients")
        self._buckets, self._buckets_before = 0, 0
        self._is_open = True

    @property
    def lost_share(self) -> float:
        """The share of values that did not come to this rank, of all that were to."""
        return self.sums.num_lost / max(1, self.sums.num_values)

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank owes to each parameter; waits until all that was sent is confirmed."""
        if self._is_open:  # closing waits for that, too
            self._thread.submit(self.rank.drive, self.sums.settle()).result()
        return {name: torch.from_numpy(one.copy()) for name, one in self.sums.residuals.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what this rank owed when the state was kept."""
        given = {name: one.numel() for name, one in dict(state or {}).items()}
        unknown = sorted(one for one in given.items() if one not in self._sizes.items())
        if unknown:
            names = ", ".join(f"{name} of {size} values" for name, size in unknown[:5])
            raise InputError(
                f"what is owed is of the module's parameters, which has no {names}; load the state of this model"
            )
        self.sums.residuals = {name: one.flatten().numpy().copy() for name, one in state.items()}

    def close(self) -> None:
        """Wait until all ranks have what was sent to them, and give the sockets back."""
        if self._is_open:
            self._is_open = False
            self._thread.submit(self.rank.drive, self.sums.settle())
            self._thread.shutdown()
            self.rank.close()

    def enqueue(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Hand a bucket over; the future has its buffer when the means are in it."""
        buffer = bucket.buffer()
        if buffer.device.type != "cpu" or not buffer.is_floating_point() or buffer.is_sparse:
            rows = "rows of " if buffer.is_sparse else ""
            raise InputError(
                f"gradients travel over UDP from the memory of hosts, whole and as real numbers, not {rows}"
                f"{buffer.dtype} on {buffer.device}; train such a model with torch's own hooks"
            )
        if not self._is_open:
            raise InputError(
                "gradients travel over a network that is open, but this one was closed; close it behind the last step"
            )
        parts = Parts(
            tuple(self._names[id(one)] for one in bucket.parameters()),
            tuple(one.numel() for one in bucket.parameters()),
        )
        # Buckets come from the back of the model: the last of a step is needed first in the next.
        behind = max(0, self._buckets_before - 1 - bucket.index())
        priority = behind * PRIORITIES // max(1, self._buckets_before)
        self._buckets += 1
        if bucket.is_last():
            self._buckets, self._buckets_before = 0, self._buckets
        urgency = min(priority, PRIORITIES - 1)
        return averaged_beside(self._thread, lambda: self._average(buffer, parts, urgency), buffer)

    def _average(self, buffer: Tensor, parts: Parts, priority: int) -> bool:
        with torch.no_grad():
            wide = buffer if buffer.itemsize >= 4 else buffer.float()
            flat: np.ndarray = wide.div_(self.rank.size).numpy()
            self.rank.drive(self.sums.sum(flat, parts, priority))
            if wide is not buffer:
                buffer.copy_(wide)
        return True


def register(
    model: DistributedDataParallel,
    tolerance: Tolerance,
    transport: Transport | None = None,
    *,
    host: str | None = None,
    dropper: Dropper | None = None,
) -> Lossy:
    """Send a model's gradients over UDP from now on. All its ranks call it, behind the wrapping.

    ``host`` is this host's address in the network that gradients take; where it is left out, that of
    the way to rank 0's. Raises InputError for another kind of model or unknown names in the bounds.
    """
    if not isinstance(model, DistributedDataParallel):
        raise InputError(
            "the hook is for torch's DistributedDataParallel, not for "
            f"{type(model).__name__}; wrap the model in it first"
        )
    if not isinstance(tolerance, Tolerance) or not isinstance(transport, Transport | None):
        raise InputError(
            f"what may be lost is a Tolerance, and how packets travel a Transport, not {tolerance!r:.40} and "
            f"{transport!r:.40}; give Tolerance(push=0.01), Transport()"
        )
    names = {id(one): name for name, one in model.module.named_parameters()}
    unknown = sorted(set(tolerance.bounds) - set(names.values()))
    if unknown:
        raise InputError(
            f"bounds are of the module's parameters, which has no {', '.join(unknown[:5])}; use the names "
            "of named_parameters()"
        )
    group = cast(dist.ProcessGroup, model.process_group)
    check_alike(tolerance, group)
    sizes = {name: one.numel() for name, one in model.module.named_parameters()}
    lossy = Lossy(join(group, transport, host=host, dropper=dropper), tolerance, names, sizes)
    model.register_comm_hook(lossy, _enqueue)
    return lossy


def join(
    group: dist.ProcessGroup,
    transport: Transport | None = None,
    *,
    host: str | None = None,
    dropper: Dropper | None = None,
) -> UdpRank:
    """Return this rank's end of UDP between the ranks of a process group, which only introduces them."""
    size = dist.get_world_size(group)

    def gather(value: Any) -> list[Any]:
        said: list[Any] = [None] * size
        dist.all_gather_object(said, value, group)
        return said

    return UdpRank(
        gather,
        dist.get_rank(group),
        host=host or own_address(),
        transport=transport,
        dropper=dropper,
    )


def own_address() -> str:
    """Return this host's address on the way to the host that torch's ranks meet at."""
    meeting = os.environ.get("MASTER_ADDR")
    if not meeting:
        raise InputError(
            "packets need this host's address, but MASTER_ADDR is not set, which would show the way; pass "
            "host='10.0.0.7' or what it is in the network that gradients take"
        )
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        try:
            way.connect((meeting, 9))
        except OSError as error:
            raise InputError(
                f"packets need this host's address, but nothing shows the way to MASTER_ADDR={meeting} ({error}); pass "
                "host='10.0.0.7' or what it is in the network that gradients take"
            ) from None
        return way.getsockname()[0]


def _enqueue(lossy: Lossy, bucket: dist.GradBucket) -> Future[Tensor]:
    return lossy.enqueue(bucket)
