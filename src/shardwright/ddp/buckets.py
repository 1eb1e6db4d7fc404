"""Buckets for DistributedDataParallel: planned from measurements, kept only where they are faster."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from shardwright.ddp.measure import (
    Loss,
    measure_all_reduce,
    measure_backward,
    run_model,
    slowest_median,
    time_step,
)
from shardwright.ddp.process import prepare_process
from shardwright.errors import InputError, ShardwrightWarning
from shardwright.planner.schedule import finish_time, merge_gradients
from shardwright.planner.schedule.merge import Buckets, MergeMethod

MEBI = 2**20
FIRST_CAP, CAP = MEBI, 25 * MEBI  # torch's defaults
# Messages of which each is timed while the others travel: gloo has two under way at once, and more wait.
UNDER_WAY = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketPlan:
    """Buckets in the order in which they are sent, as bytes and as parameters' names.

    ``finish_seconds`` is when the last message should end, from the beginning of backward, and
    ``default_finish_seconds`` the same with torch's default buckets; both are modelled from what backward and messages
    take each by itself.
    """

    sizes_bytes: tuple[int, ...]
    names: tuple[tuple[str, ...], ...]
    finish_seconds: float
    default_finish_seconds: float

    @property
    def bucket_cap_mb_list(self) -> list[float]:
        """What DistributedDataParallel takes: a bucket closes when it reaches its cap."""
        return [size / MEBI for size in self.sizes_bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketChoice:
    """A plan and how it did: seconds of a forward and backward, medians of turns, both ways."""

    plan: BucketPlan
    seconds: float
    default_seconds: float
    is_rebuilt: bool

    @property
    def is_kept(self) -> bool:
        """Whether torch made the planned buckets, and they are no slower than its own."""
        return self.is_rebuilt and self.seconds <= self.default_seconds


def plan_buckets(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss | None = None,
    group: ProcessGroup | None = None,
    method: MergeMethod = "optimal",
    steps: int = 5,
) -> BucketPlan:
    """Plan a model's buckets from its measured backward and the group's measured all-reduce.

    All ranks call it together, each with a batch of its own of the usual size: a mapping of keywords, a
    tuple of arguments, or one argument. ``method`` is that of ``merge_gradients``: ``optimal`` is exact,
    ``mgwfbp`` the published rule. The model is run ``steps + 1`` times; its gradients, its buffers and
    torch's random numbers stay as they were.
    """
    everyone = _group(group)
    device = _checked(model, loss)
    _check_count("steps", steps)
    measured = measure_backward(model, batch, loss, everyone, steps)
    total = sum(measured.sizes_bytes)
    cost = measure_all_reduce(total, everyone, device)
    queued = measure_all_reduce(total, everyone, device, UNDER_WAY)
    ready, sizes = measured.ready_seconds, measured.sizes_bytes
    buckets = merge_gradients(ready, sizes, cost, method, queued=queued)
    default = default_buckets(sizes)
    return BucketPlan(
        sizes_bytes=tuple(sum(sizes[one] for one in bucket) for bucket in buckets),
        names=tuple(tuple(measured.names[one] for one in bucket) for bucket in buckets),
        finish_seconds=finish_time(buckets, ready, sizes, cost, queued=queued),
        default_finish_seconds=finish_time(default, ready, sizes, cost, queued=queued),
    )


def default_buckets(sizes_bytes: tuple[int, ...]) -> Buckets:
    """Return torch's own buckets: 1 MiB, then 25 MiB each, closed by the gradient that reaches it."""
    edges, held = [0], 0
    for place, size in enumerate(sizes_bytes, 1):
        held += size
        if held >= (FIRST_CAP if len(edges) == 1 else CAP) or place == len(sizes_bytes):
            edges.append(place)
            held = 0
    return tuple(tuple(range(a, b)) for a, b in pairwise(edges))


def choose_buckets(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss | None = None,
    group: ProcessGroup | None = None,
    turns: int = 7,
) -> BucketChoice:
    """Plan buckets, and time them beside torch's default, in turns, on copies of the model.

    Two more models and their gradients are in memory meanwhile. All ranks get the same answer.
    """
    everyone = _group(group)
    device = _checked(model, loss)
    _check_count("turns", turns)
    copies = [_copied(model), _copied(model)]  # first: a step may leave activations in a model
    plan = plan_buckets(model, batch, loss=loss, group=everyone)
    caps = (plan.bucket_cap_mb_list, None)
    ways = [_parallel(one, everyone, device, cap) for one, cap in zip(copies, caps, strict=True)]
    laps: list[list[float]] = [[], []]
    with torch.random.fork_rng():
        for _ in range(turns + 2):  # two until the buckets have been made anew and are warm
            for way, one in zip(ways, laps, strict=True):
                one.append(time_step(lambda way=way: _step(way, batch, loss), everyone, device))
    made = ways[0]._get_ddp_logging_data().get("rebuilt_bucket_sizes", "")
    seconds = [slowest_median(one[2:], everyone, device) for one in laps]
    del ways, copies
    gc.collect()  # the copies, which hold on to themselves and to the process group
    return BucketChoice(
        plan=plan,
        seconds=seconds[0],
        default_seconds=seconds[1],
        is_rebuilt=tuple(map(int, made.split(","))) == plan.sizes_bytes if made else False,
    )


def wrap(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss | None = None,
    group: ProcessGroup | None = None,
    choice: BucketChoice | None = None,
) -> DistributedDataParallel:
    """Wrap a model in DistributedDataParallel with planned buckets, or its default where that is faster.

    ``choice``: what ``choose_buckets`` found, where it was asked before. Warns where torch did not make
    the buckets that were planned.
    """
    everyone = _group(group)
    device = _checked(model, loss)
    _check_choice(choice, model)
    found = choice or choose_buckets(model, batch, loss=loss, group=everyone)
    if not found.is_rebuilt:
        warnings.warn(
            "torch made other buckets than planned (gradients come in another order from step to step, or some are "
            "sparse); its default is used",
            ShardwrightWarning,
            stacklevel=2,
        )
    caps = found.plan.bucket_cap_mb_list if found.is_kept else None
    return _parallel(model, everyone, device, caps)


def _copied(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise InputError(
            f"both ways are timed on copies of the model, but this one cannot be copied ({str(error)[:100]}); ask "
            "before its first step, do not let it keep activations (the older nn.utils.weight_norm does), or pass "
            "bucket_cap_mb_list of plan_buckets to DistributedDataParallel"
        ) from error


def _parallel(
    model: nn.Module, group: ProcessGroup, device: torch.device, caps: list[float] | None
) -> DistributedDataParallel:
    ids = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(
        model,
        device_ids=ids,
        process_group=group,
        bucket_cap_mb_list=caps,  # type: ignore[arg-type]
    )


def _step(model: nn.Module, batch: Any, loss: Loss | None) -> None:
    model.zero_grad(set_to_none=True)
    run_model(model, batch, loss).backward()


def _group(group: ProcessGroup | None) -> ProcessGroup:
    """Return the group that is meant, once this process is ready to talk in it."""
    found = group or (dist.group.WORLD if dist.is_initialized() else None)
    if found is dist.GroupMember.NON_GROUP_MEMBER:
        raise InputError(
            "buckets are measured on the ranks that will train, but this rank is not in the group; call it "
            "on the ranks that new_group was given"
        )
    if found is None:
        raise InputError(
            "buckets are measured on the ranks that will train, but there is no process group; call "
            "torch.distributed.init_process_group first"
        )
    prepare_process(found)
    return found


def _check_count(name: str, count: int) -> None:
    if not isinstance(count, int) or count < 1:
        raise InputError(
            f"a median needs at least one measurement, not {name}={count!r:.40}; give 5 or more"
        )


def _check_choice(choice: BucketChoice | None, model: nn.Module) -> None:
    """Raise InputError for buckets of another model."""
    if choice is None:
        return
    if not isinstance(choice, BucketChoice):
        raise InputError(
            f"buckets are kept by what choose_buckets returned, not by {type(choice).__name__}; give that, or leave "
            "choice out"
        )
    sizes = {name: one.nbytes for name, one in model.named_parameters() if one.requires_grad}
    planned = sorted(chain.from_iterable(choice.plan.names))
    if planned != sorted(sizes) or sum(choice.plan.sizes_bytes) != sum(sizes.values()):
        raise InputError(
            f"buckets are of the model that they were chosen for, with {len(planned)} gradients of "
            f"{sum(choice.plan.sizes_bytes)} bytes, but this one has {len(sizes)} of {sum(sizes.values())}; ask "
            "choose_buckets with this model"
        )


def _check_kinds(model: nn.Module, loss: Loss | None) -> None:
    if not isinstance(model, nn.Module) or not (loss is None or callable(loss)):
        raise InputError(
            "a step is timed of a torch.nn.Module and its loss, a function from what it returns to one number, not of "
            f"{type(model).__name__} and {loss!r:.40}; give both, or leave loss out where the model returns it"
        )


def _unfit(model: nn.Module, kinds: Sequence[str]) -> str:
    """Say why a module with trained parameters of these kinds cannot have planned buckets, and what to do."""
    if isinstance(model, DistributedDataParallel):
        return "is wrapped already; give the module itself"
    if any(
        hasattr(one, "device_mesh") for one in model.parameters()
    ):  # DTensor takes seconds to import
        return "is sharded (FSDP2, tensor parallelism), which sends gradients its own way; leave it as it is"
    if any(map(is_lazy, (*model.parameters(), *model.buffers()))):
        return "has parameters or buffers without a shape yet; run it once on a batch before"
    if not kinds:
        return "trains nothing; set requires_grad of what is to be trained"
    if len(kinds) > 1:
        return f"has gradients of {', '.join(kinds)}; use the default buckets of DistributedDataParallel"
    return ""


def _checked(model: nn.Module, loss: Loss | None) -> torch.device:
    """Return a model's device. Raises InputError where torch would not fill buckets in one order, and for what is no
    model or loss."""
    _check_kinds(model, loss)
    trained = [one for one in model.parameters() if one.requires_grad]
    kinds = sorted({f"{one.dtype} on {one.device}" for one in trained})
    if wrong := _unfit(model, kinds):
        raise InputError(
            f"buckets are planned for a plain module with trained parameters of one dtype on one device, but this one {wrong}"
        )
    if trained[0].device.type == "meta":
        raise InputError(
            "a step is timed of a model with numbers, but this one's are on the meta device; give it memory first "
            "(model.to_empty, then what sets its weights)"
        )
    return trained[0].device
