"""Measurements where the plan is to run: taken by the ranks of a cluster, used by whoever plans for it."""

from __future__ import annotations

import datetime
import os
import re
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from shardwright.core.costs import CostTable, Record, collective_key
from shardwright.errors import InputError, PlanMismatch
from shardwright.files.clusterfile import read_cluster
from shardwright.planner.cost.burden import message_burden
from shardwright.runtime.agreement import rank
from shardwright.runtime.profile import hosts
from shardwright.verbs.hosts import profile_hosts
from shardwright.verbs.measure import costs_of, environment_of, keep, known_costs
from shardwright.verbs.request import Request, Watch
from shardwright.verbs.results import Profile, Study
from shardwright.verbs.study import study
from tests.runtime.world import run_ranks
from tests.verbs.test_trials import MODEL

HOSTS = """
name = "pair"
[kind.core]
peak = {{ float32 = "50 GFLOP/s" }}
memory = "1 GiB"
memory_bandwidth = "10 GB/s"
backend = "cpu"
[[host]]
count = {count}
kind = "core"
devices = {devices}
link = "5 GB/s"
uplink = "10 Gbit/s"
"""


def described(count: int, devices: int = 1) -> str:
    return HOSTS.format(count=count, devices=devices)


@pytest.mark.parametrize(
    ("count", "devices", "shapes"),
    [
        (1, 2, [[(0, 1)]]),
        (4, 1, [[(0, 1), (2, 3)], [(0, 1, 2, 3)]]),
        (3, 1, [[(0, 1, 2)]]),
        (2, 2, [[(0, 1), (2, 3)], [(0, 2)], [(0, 1, 2, 3)]]),
    ],
)
def test_groups_of_every_shape_are_measured_with_each_host_in_one_of_them(
    count: int, devices: int, shapes: list[list[tuple[int, ...]]]
) -> None:
    found = hosts.group_shapes(read_cluster(described(count, devices)))
    assert [list(groups) for groups in found] == shapes


def test_hosts_with_unequal_devices_are_measured_as_one_group_too() -> None:
    more = (
        '[[host]]\nname = "b"\nkind = "core"\ndevices = 3\nlink = "5 GB/s"\nuplink = "10 Gbit/s"\n'
    )
    found = hosts.group_shapes(read_cluster(described(1, 2) + more))
    assert [list(groups) for groups in found] == [
        [(0, 1), (2, 3)],
        [(0, 2)],
        [(0, 1, 2, 3)],
        [(0, 1, 2, 3, 4)],
    ]


def test_other_numbers_of_ranks_and_devices_of_several_kinds_are_refused() -> None:
    with pytest.raises(
        PlanMismatch, match=r"pair has 2 devices, but 1 ranks were started; start one for each"
    ):
        profile_hosts("", read_cluster(described(2)), Request(), Watch())
    with pytest.raises(InputError, match=r"pair has one device"):
        profile_hosts("", read_cluster(described(1)), Request(), Watch())
    other = described(1).replace("[[host]]", '[kind.gpu]\npeak = { float32 = "1 TFLOP/s" }\nmemory = "1 GiB"\n'
        'memory_bandwidth = "1 TB/s"\n[[host]]\nname = "b"\nkind = "gpu"\ndevices = 1\nlink = "5 GB/s"\nuplink = "10 Gbit/s"\n[[host]]')  # fmt: skip
    with pytest.raises(
        InputError, match=r"devices of 2 kinds \(.*\).* measure the hosts of each kind"
    ):
        profile_hosts("", read_cluster(other), Request(), Watch())


def measured(file: str, model: str, store: str) -> Profile:
    """Profile as one rank, so briefly that the numbers say nothing but that they are there."""
    from shardwright.runtime.profile import passes

    os.environ["SHARDWRIGHT_STORE"] = (
        store  # ranks have the environment that their first parent had
    )
    hosts.PROBE = hosts.Probe(primitives=("all_reduce",), sizes=(1024,), overheads=False)
    hosts.BRIEF = replace(hosts.PROBE, sizes=(1024, 4096))
    hosts.CROWDED_ROUNDS, passes.LEAST_SECONDS = 1, 0.02
    request = Request(global_batch=8, seconds=60.0, seed_plan="megatron:2x1")
    return profile_hosts(model, file, request, Watch())


BEFORE = (datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1)).isoformat()
Ran = tuple[Profile, CostTable, list[tuple[str, ...]]]


def measured_again(file: str, model: str, store: str, before: str) -> Ran:
    """Return a first profile, and what is then known of its cluster; and what is said of a fresh profile; of
    one made long ``before``, by which everything took 1,000 times as long as it did; and of one whose
    half-widths allow that, and a first message that others held up for some ticks."""
    first, notes = measured(file, model, store), list[tuple[str, ...]]()
    known = known_costs(where=environment_of(read_cluster(described(2))))
    for change in ("", "seconds = 1000 * seconds, spread = 0", "spread = 1e6 * seconds"):
        if rank() == 0 and change:
            with closing(sqlite3.connect(store)) as records, records:
                records.execute(
                    f"UPDATE record SET measured_at = ?, {change} "
                    "WHERE key LIKE 'collective|%' OR key LIKE 'operator|%'",
                    (before,),
                )
        found = measured(file, model, store)
        assert found.num_measured == 0
        notes.append(found.notes)
    return first, known, notes


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> list[Ran]:
    """What two ranks measured, again and again, from an empty store."""
    folder = tmp_path_factory.mktemp("pair")
    file = folder / "pair.toml"
    file.write_text(described(2))
    (folder / "net.py").write_text(MODEL)
    words = (str(file), f"{folder}/net.py:build", str(folder / "records.sqlite"))
    return run_ranks(2, measured_again, *words, BEFORE, timeout=200)


@pytest.mark.ranks
@pytest.mark.timeout(240)
def test_what_ranks_measure_is_what_their_cluster_is_planned_with(ran: list[Ran]) -> None:
    (first, costs, _), _ = ran
    cluster = read_cluster(described(2))
    assert costs == first.costs
    assert first.num_measured > 10
    points = costs.collective_map[collective_key("all_reduce", 2, 2, "10Gbit/s")]
    assert [size for size, _, _ in points] == [1024]
    burden = message_burden("all_reduce", 1024, (0, 1), cluster, costs)
    assert burden.held > 0
    # Ranks that have a core each may be late of themselves.
    cores = costs.overhead_map["cores"]
    assert 0 < cores <= 2
    assert burden.skew == 0 or cores == 2
    assert costs.operators


@pytest.mark.ranks
@pytest.mark.timeout(240)
def test_a_profile_an_hour_old_holds_within_its_half_widths_or_it_is_said_that_it_does_not(
    ran: list[Ran],
) -> None:
    (*_, (fresh, other, wide)), (*_, others) = ran
    assert (fresh, wide, others) == ((), (), [(), (), ()])
    for note, what in zip(sorted(other), ("messages", "operators"), strict=True):
        # A message may take a tick of the scheduler, 40 times its own time, where others compute.
        said = rf"{what} now take 0\.\d\d times .* when these ranks were measured \({re.escape(BEFORE)}\)"
        assert re.match(said, note)


def test_a_cluster_that_was_measured_is_planned_with_that_unless_told_not_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDWRIGHT_STORE", str(tmp_path / "records.sqlite"))
    (tmp_path / "net.py").write_text(MODEL)
    cluster = read_cluster(described(2))
    key = collective_key("all_reduce", 2, 2, "10Gbit/s")
    keep(
        [
            Record(
                key=f"{key}|1024",
                seconds=1.0,
                spread=0.0,
                count=1,
                environment=environment_of(cluster),
            )
        ]
    )

    def planned(measure: str) -> Study:
        request = Request(global_batch=8, seed_plan="megatron:2x1", measure=measure)
        return study(f"{tmp_path}/net.py:build", cluster, request)

    told, bare = planned("auto"), planned("never")
    assert told.costs.collective_map[key][0][1] == 1.0
    assert bare.costs == CostTable()
    assert costs_of(told.frontier.best, cluster) == told.costs
    assert costs_of(bare.frontier.best, cluster) == CostTable()
    seconds = [one.frontier.best.predicted.step_seconds for one in (told, bare)]
    assert seconds[0] > 1.0 > seconds[1]
