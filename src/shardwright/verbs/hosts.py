"""Measurements where a plan is to run: every rank of a cluster calls ``profile_hosts`` under torchrun.

Rank 0 leads: it knows the store, plans with what is known, and says what is measured next; all ranks
measure it at once. What they saw is kept in rank 0's store under the cluster's name and devices, where
``plan`` for the same cluster finds it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardwright.core.cluster import Cluster
from shardwright.core.costs import CostTable, Record, collective_key, link_label
from shardwright.errors import InputError, PlanMismatch
from shardwright.store import is_old
from shardwright.verbs.request import Request, Watch
from shardwright.verbs.results import Profile, Study
from shardwright.verbs.subject import find_cluster

if TYPE_CHECKING:
    from shardwright.runtime.capture import Captured
    from shardwright.runtime.profile import Probe, Wanted

# Of all shapes of groups together, beneath computation not counted.
LINK_SECONDS = 16.0
# Ranks that are told nothing meanwhile wait for rank 0 to plan.
PATIENCE_SECONDS = 3600.0


def profile_hosts(model: str, cluster: Cluster | str, request: Request, watch: Watch) -> Profile:
    """Measure messages between all ranks and, given a model, the operators that its best plans run.

    A collective call, with one rank for each device. What is known is not measured again, unless
    ``measure`` is always. Raises PlanMismatch for other numbers of ranks, InputError for a cluster
    that cannot be measured.
    """
    from shardwright.runtime.allocator import keep_freed_memory
    from shardwright.runtime.launch import join_world, meet
    from shardwright.verbs.measure import environment_of, known_costs

    machine = _described(cluster)
    rank, size = join_world(timeout=PATIENCE_SECONDS)
    if size != machine.num_devices:
        raise PlanMismatch(
            f"{machine.name} has {machine.num_devices} devices, but {size} ranks were started; start one "
            "for each device: torchrun --nnodes ... --nproc-per-node ... -m shardwright profile MODEL "
            "--cluster FILE"
        )
    keep_freed_memory()
    count, notes = _links(machine, request, watch, is_first=rank == 0)
    if model and rank == 0:
        found = _lead(model, machine, request, watch)
        count += found.num_measured
        notes = *notes, *found.notes
    elif model:
        _follow(model, machine, request)
    meet("at the end of profiling")
    costs = known_costs(where=environment_of(machine)) if rank == 0 else CostTable()
    return Profile(
        cluster=machine,
        costs=costs,
        num_measured=count,
        num_known=len(costs.operators) + sum(len(points) for _, points in costs.collectives),
        notes=notes,
    )


def _described(cluster: Cluster | str) -> Cluster:
    """Return the cluster whose ranks are here."""
    machine, _ = find_cluster(cluster)
    if machine.num_devices < 2:
        raise InputError(
            f"{machine.name} has one device, which nothing is sent to; measure it on its host with "
            "`shardwright profile MODEL`, without a cluster"
        )
    used = {device.kind for device in machine.devices}
    if len(used) > 1:
        names = ", ".join(machine.kinds[kind].name for kind in sorted(used))
        raise InputError(
            f"{machine.name} has devices of {len(used)} kinds ({names}), but what is measured is kept for "
            "one; measure the hosts of each kind as a cluster of their own"
        )
    return machine


def _links(
    machine: Cluster, request: Request, watch: Watch, *, is_first: bool
) -> tuple[int, tuple[str, ...]]:
    """Measure messages that are not known, or look whether those that are still hold; return how many
    are new, and what to say of the others."""
    from shardwright.runtime.profile import hosts
    from shardwright.verbs.measure import environment_of, keep
    from shardwright.verbs.pace import newest

    known = newest(environment_of(machine)) if is_first else {}
    probe = _told(_probe(machine, request, known))
    if probe is None:
        return 0, ()
    records = hosts.measure_links(
        machine,
        environment=environment_of(machine),
        budget_seconds=LINK_SECONDS,
        report=lambda done, of: watch.tell("measuring messages between ranks", done / of),
        probe=probe,
    )
    if not is_first:
        return 0, ()
    if probe == hosts.BRIEF:  # what is known stays; whether it still holds is all that is asked
        return 0, _held(known, records)
    keep(records)
    return len(records), ()


def _probe(machine: Cluster, request: Request, known: Mapping[str, Record]) -> Probe | None:
    """Return which messages to measure: all, some of those that are known and old, or none."""
    from shardwright.runtime.profile import hosts

    everyone = tuple(range(machine.num_devices))
    num_hosts = len({device.host for device in machine.devices})
    key = collective_key("all_reduce", num_hosts, len(everyone), link_label(machine, everyone))
    last = [one for name, one in known.items() if name.startswith(f"{key}|")]
    if request.measure == "always" or not last:
        return hosts.PROBE
    return hosts.BRIEF if is_old(last) else None


def _held(known: Mapping[str, Record], records: Sequence[Record]) -> tuple[str, ...]:
    """Say if messages now take another time than was known of them."""
    from shardwright.verbs.pace import HOSTS, ratio

    pace = ratio(known, [one for one in records if one.key.startswith("collective|")])
    note = replace(pace, what="messages", where=HOSTS).note if pace else ""
    return (note,) if note else ()


def _lead(model: str, machine: Cluster, request: Request, watch: Watch) -> Study:
    """Plan as rank 0, and measure with all ranks what that asks for."""
    from shardwright.verbs.measure import Bench, environment_of, seconds_for
    from shardwright.verbs.study import study

    def measure(
        captured: Captured, wanted: Wanted, _: Cluster, asked: Request, watch: Watch
    ) -> list[Record]:
        task = wanted, seconds_for(wanted, watch)
        return _measure(captured, _told(task), asked, machine, watch)

    bench = Bench(environment=environment_of(machine), measure=measure)
    try:
        return study(model, machine, request, watch, bench=bench)
    finally:
        _told(None)


def _follow(model: str, machine: Cluster, request: Request) -> None:
    """Measure as another rank what rank 0 asks for, until it asks for nothing more."""
    from shardwright.verbs.precision import captured_on

    captured, request, _ = captured_on(machine, model, request)
    while (task := _told(None)) is not None:
        _measure(captured, task, request, machine, Watch())


def _measure(
    captured: Captured,
    task: tuple[Wanted, float],
    request: Request,
    machine: Cluster,
    watch: Watch,
) -> list[Record]:
    from shardwright.runtime.profile import Setting, hosts
    from shardwright.verbs.measure import environment_of

    wanted, seconds = task
    return hosts.measure_operators(
        captured,
        wanted,
        Setting(environment=environment_of(machine), precision=request.precision),
        budget_seconds=seconds,
        report=lambda done, of: watch.tell(f"measuring operator shards, {done} of {of}", done / of),
    )


def _told(what: Any) -> Any:
    """Return on every rank what rank 0 says."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return what
    said = [what]
    dist.broadcast_object_list(said, src=0)
    return said[0]
