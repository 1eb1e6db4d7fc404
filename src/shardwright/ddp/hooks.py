"""Communication hooks for torch's DistributedDataParallel.

``register(model, Compression(method="gtop-k", density=0.001))`` is all. Buckets wait in one queue, in
the order in which DistributedDataParallel hands them over, which is the same on all ranks; one thread
takes them out, compresses them and talks to the other ranks, of small buckets together, in a process group of its own: DistributedDataParallel asks
for unused parameters, and layers such as SyncBatchNorm talk, in its group meanwhile. So no order of
messages can differ, whatever a method sends.
"""

# Annotations stay types, not texts: torch looks at those of a hook.
import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from shardwright.core.compression import WARM_UP
from shardwright.ddp.compressor import Compressor, reshared
from shardwright.ddp.methods import Load, wire_bytes
from shardwright.ddp.process import prepare_process
from shardwright.ddp.settings import Compression
from shardwright.ddp.wire import GroupWire
from shardwright.errors import InputError
from shardwright.runtime.agreement import check_alike
from shardwright.runtime.handing import averaged_beside

__all__ = ["WARM_UP", "Compression", "Compressor", "Load", "register", "reshared", "wire_bytes"]


def register(model: DistributedDataParallel, settings: Compression) -> Compressor:
    """Compress a model's gradients from now on; return what keeps the residuals. All its ranks call it.

    Save its ``state_dict()`` on every rank beside the model's. Gradients accumulated under ``no_sync``
    are compressed once, with the last. Raises InputError for another kind of model or unknown names.
    """
    if not isinstance(model, DistributedDataParallel):
        raise InputError(
            "hooks are for torch's DistributedDataParallel, not for "
            f"{type(model).__name__}; wrap the model in it first (FSDP2 has reduce_dtype in its "
            "MixedPrecisionPolicy, and no hook that knows parameters)"
        )
    _check_settings(settings)
    names = _named(model.module, settings)
    odd = [one.dtype for one in model.module.parameters() if one.requires_grad and one.is_complex()]
    if odd:
        raise InputError(
            f"gradients are compressed as real numbers, but this model trains parameters of {odd[0]}; keep "
            "them as pairs of real numbers (torch.view_as_real), or leave its gradients as they are"
        )
    elements = sum(one.numel() for one in model.module.parameters() if one.requires_grad)
    group = _own_group(model)
    check_alike(settings, group)
    compressor = Compressor(settings, GroupWire(group), elements, names.values())
    try:
        model.register_comm_hook(_Queue(compressor, names), _enqueue)
    except RuntimeError as error:
        raise InputError(
            f"this model's gradients travel by a hook already ({error}); wrap the module anew to have another"
        ) from error
    return compressor


def _check_settings(settings: Compression) -> None:
    if not isinstance(settings, Compression):
        raise InputError(
            f"how gradients travel is a Compression, not {settings!r:.40}; give "
            'Compression(method="top-k", density=0.01) or another'
        )


def _named(module: nn.Module, settings: Compression) -> dict[int, str]:
    """Return the names of parameters. Raises InputError where settings name others."""
    names = {id(one): name for name, one in module.named_parameters()}
    unknown = sorted(map(str, set(settings.densities) - set(names.values())))
    if unknown:
        raise InputError(
            f"densities are of the module's parameters, which has no {', '.join(unknown[:5])}; use the "
            "names of named_parameters()"
        )
    return names


def _own_group(model: DistributedDataParallel) -> dist.ProcessGroup:
    theirs = model.process_group
    prepare_process(theirs)
    group: dist.ProcessGroup = dist.new_group(  # type: ignore[assignment]
        dist.get_process_group_ranks(theirs),
        backend=dist.get_backend(theirs),
        use_local_synchronization=True,
    )
    # A rank that left now would close connections that slower ones still make (gloo's connectFullMesh).
    dist.all_reduce(torch.zeros((), device=next(model.parameters()).device), group=group)
    return group


class _Queue:
    """One thread that takes buckets in order; with GPUs it works on a stream of its own."""

    def __init__(self, compressor: Compressor, names: dict[int, str]) -> None:
        self.compressor, self.names = compressor, names
        self.waiting: list[Callable[[], None]] = []
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="gradient compression")
        self.streams: dict[torch.device, torch.cuda.Stream] = {}
        self.has_begun = False

    def begin(self, device: torch.device) -> None:
        """Before the first message, see that all ranks are in one step: how much they send depends on it. Raises
        InputError, on all of them."""
        if self.has_begun:
            return
        mine = torch.tensor([self.compressor.step], device=device)
        steps = self.compressor.wire.all_gather(mine).flatten().tolist()
        if len(set(steps)) > 1:
            raise InputError(
                f"ranks compress gradients of one step, but go on from steps {', '.join(map(str, steps[:8]))}; load "
                "on every rank the state that it saved, or on none"
            )
        self.has_begun = True

    def beside(self, device: torch.device) -> Callable[[], contextlib.AbstractContextManager[None]]:
        """Return a context that continues behind what the caller's stream has been given so far."""
        if device.type != "cuda":
            return contextlib.nullcontext
        stream = self.streams.setdefault(device, torch.cuda.Stream(device))
        ready = torch.cuda.current_stream(device).record_event()

        @contextlib.contextmanager
        def continued() -> Iterator[None]:
            with torch.cuda.device(device), torch.cuda.stream(stream):
                stream.wait_event(ready)
                yield

        return continued


def _enqueue(queue: _Queue, bucket: dist.GradBucket) -> Future[Tensor]:
    """Hand a bucket over; the future has its buffer when the means are in it."""
    buffer, is_last = bucket.buffer(), bucket.is_last()
    if buffer.is_sparse:
        raise InputError(
            "gradients are compressed where every element has a place, but an embedding with sparse=True "
            "gives rows only; leave sparse out: what is not sent costs nothing on the wire"
        )
    names = [queue.names[id(one)] for one in bucket.parameters()]
    gradients = dict(zip(names, bucket.gradients(), strict=True))
    continued = queue.beside(buffer.device)

    def average() -> bool:
        with torch.no_grad():
            queue.begin(buffer.device)
            return queue.compressor.offer(gradients, is_last=is_last)

    return averaged_beside(queue.thread, average, buffer, continued, queue.waiting)
