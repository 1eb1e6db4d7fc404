"""Prices of a hand-written Program: every kind of instruction, from simple measurements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from shardwright.core.cluster import Cluster
from shardwright.core.compression import merge_rounds
from shardwright.core.costs import (
    ADD,
    PACK,
    PACK_DENSITIES,
    UPDATE,
    Cost,
    CostTable,
    collective_key,
    operator_key,
    update_key,
)
from shardwright.core.graph import Operator, OperatorGraph, TensorSpec
from shardwright.core.program import Call, Kind, Message, Program, Segment, Value, resource_classes
from shardwright.core.strategy import Mesh, OperatorConfig, ParameterConfig, Strategy
from shardwright.files.clusterfile import parse_cluster, read_cluster
from shardwright.planner.cost import Rates, collective_seconds, price
from shardwright.planner.cost.groups import peer_groups
from shardwright.planner.cost.roofline import memory_seconds
from shardwright.planner.cost.totals import SLOW_HOST, started, total
from shardwright.planner.cost.transfers import paired_seconds
from shardwright.planner.cost.update import added_seconds, update_seconds
from shardwright.planner.lower import lower
from shardwright.planner.space import Seed, seed_strategy
from tests.planner.search.models import residual

CPU = read_cluster(
    '[kind.c]\npeak = {float32 = "0.1 TFLOP/s"}\nmemory = "1 GB"\nmemory_bandwidth = "10 GB/s"\n'
    'backend = "cpu"\n[[host]]\nkind = "c"\ndevices = 4\nlink = "2 GB/s"\n'
)
GRAPH = OperatorGraph(
    name="g",
    tensors=(
        TensorSpec(name="x", shape=(8, 16), dtype="float32", role="input"),
        TensorSpec(name="w", shape=(4, 16), dtype="float32", role="parameter", needs_gradient=True),
        TensorSpec(
            name="y",
            shape=(8, 4),
            dtype="float32",
            role="activation",
            producer=0,
            needs_gradient=True,
        ),
    ),
    operators=(
        Operator(
            name="y",
            kind="aten.linear",
            inputs=(0, 1),
            input_names=("input", "weight"),
            outputs=(2,),
        ),
    ),
    blocks=(),
    loss=2,
)
LOCAL = ((4, 16), (4, 16)), ((4, 4),)
ROWS = [
    (Kind.FORWARD, 0, 0),
    (Kind.BACKWARD, 0, 0),
    (Kind.RECOMPUTE, 0, 0),
    (Kind.MESSAGE, 0, 0),
    (Kind.SEND, 0, 1),
    (Kind.RECEIVE, 1, 1),
    (Kind.UPDATE, 0, -1),
    (Kind.CLIP, 0, -1),
    (Kind.UPDATE, 1, -1),
    (Kind.FORWARD, 0, 0),
]


def program() -> Program:
    meshes = (
        Mesh(axes=("d",), sizes=(2,), devices=(0, 1)),
        Mesh(axes=("d",), sizes=(2,), devices=(2, 3)),
    )
    strategy = Strategy(
        meshes=meshes,
        configs=(OperatorConfig(mesh=0, dims=("b",)),),
        parameters=(ParameterConfig(rest=(-1,), optimizer=(0,)),),
    )
    common = {"mesh": 0, "dtype": "float32", "scope": "step"}
    values = (
        Value(tensor=0, layout=(0,), shape=(4, 16), role="input", **common),
        Value(tensor=1, layout=(-1,), shape=(4, 16), role="parameter", gradient=3, **common),
        Value(tensor=2, layout=(0,), shape=(4, 4), role="activation", **common),
        Value(tensor=1, layout=(-2,), shape=(4, 16), role="gradient", **common),
    )
    call = Call(operator=0, operands=(0, 1), results=(2,), result_shapes=((4, 4),), dims=("b",))
    segment = Segment(
        mesh=0, block=0, calls=(call,), inputs=(0, 1), outputs=(2,), has_backward=True
    )
    messages = (
        Message(
            primitive="all_reduce", mesh=0, axes=(0,), sources=(3,), results=(3,), dims=((-1, -1),),
            bytes=2000, purpose="synchronise",
        ),
        Message(
            primitive="transfer", mesh=0, axes=(), sources=(2,), results=(2,), dims=((-1, -1),),
            bytes=1000, purpose="activation", destination=1,
        ),
    )  # fmt: skip
    count = len(ROWS)
    kind, group, item = zip(*ROWS, strict=True)
    none = np.zeros(count, dtype=np.int64)
    return Program(
        strategy=strategy,
        values=values,
        segments=(segment,),
        messages=messages,
        loss=2,
        kind=np.array(kind, dtype=np.int8),
        group=np.array(group, dtype=np.int32),
        item=np.array(item, dtype=np.int32),
        microbatch=np.zeros(count, dtype=np.int32),
        resource=np.zeros(count, dtype=np.int32),
        resource_names=("compute:0",),
        resource_class=resource_classes(("compute:0",)),
        offset=np.zeros(count + 1, dtype=np.int64),
        predecessor=np.zeros(0, dtype=np.int32),
        free_offset=np.zeros(count + 1, dtype=np.int64),
        free_value=np.zeros(0, dtype=np.int32),
        allocated=none,
        freed=none,
        temporary=none,
        base_bytes=(0, 0),
    )


def table() -> CostTable:
    keys = [
        operator_key(GRAPH, GRAPH.operators[0], *LOCAL, phase) for phase in ("forward", "backward")
    ]
    reduce_key = collective_key("all_reduce", 1, 2, "loopback")
    send_key = collective_key("transfer", 1, 2, "loopback")
    return CostTable(
        operators=(
            (keys[0], Cost(seconds=3.0, spread=0.3, source="measured")),
            (keys[1], Cost(seconds=5.0, spread=0.5, source="measured")),
        ),
        collectives=(
            (reduce_key, ((1000.0, 1.0, 0.1), (3000.0, 3.0, 0.1))),
            (send_key, ((1000.0, 7.0, 0.1), (3000.0, 9.0, 0.1))),
            (UPDATE, ((0.0, 2.0, 0.1), (256.0, 34.0, 0.1))),
        ),
        overheads=(
            ("segment_seconds", 0.5),
            ("message_seconds", 0.25),
            ("update_seconds", 1.5),
        ),
    )


def test_every_kind_of_instruction_is_priced_from_its_measurements():
    prices = price(program(), GRAPH, CPU, table())
    update = 1.5 + 2.0 + 0.125 * 4 * 16 * 4 / 2  # one tensor: half of it is the optimizer's shard
    expected = [3.5, 5.5, 3.5, 2.25, 7.25, 0.25, update]
    assert prices.seconds[:7] == pytest.approx(expected)
    assert prices.seconds[8] == 0  # no parameters on the second stage
    assert prices.seconds[9] == prices.seconds[0]
    assert (prices.seconds[7] > 0, prices.spread[0]) == (True, pytest.approx(0.3))


def test_an_update_is_priced_as_measured_of_an_optimizer_that_keeps_as_much():
    two, one = ((0.0, 0.0, 0.0), (8.0, 56.0, 7.0)), ((0.0, 0.0, 0.0), (8.0, 51.0, 5.0))
    older = CostTable(collectives=((UPDATE, two),))
    newer = CostTable(collectives=((UPDATE, two), (update_key(1), one)))
    kind = CPU.kind_of(0)

    def seconds(states, costs):
        return update_seconds(8.0, states, kind, costs).seconds

    assert [seconds(states, older) for states in range(4)] == pytest.approx([24, 40, 56, 72])
    assert [seconds(states, newer) for states in range(4)] == pytest.approx([24, 51, 56, 72])
    assert seconds(1, CostTable()) == memory_seconds(8.0 * 5, kind)


def test_later_microbatches_also_add_their_gradients_to_the_sum():
    kind = program().kind.copy()
    kind[2] = Kind.BACKWARD
    one = replace(program(), kind=kind)
    microbatch = np.zeros_like(one.microbatch)
    microbatch[2] = 1
    several = replace(one, microbatch=microbatch)
    added = price(several, GRAPH, CPU, table()).seconds - price(one, GRAPH, CPU, table()).seconds
    assert added[2] == pytest.approx(3 * 4 * 16 * 4 / (0.7 * 10e9), abs=1e-12)
    assert not added[[0, 1, *range(3, len(added))]].any()


def test_what_adding_takes_is_read_off_what_was_measured_tensor_by_tensor():
    points = (ADD, ((64.0, 1.0, 0.1), (256.0, 7.0, 0.1)))
    measured = replace(table(), collectives=(*table().collectives, points))
    sizes = (3 * 64.0, 3 * 160.0)
    assert added_seconds(sizes, CPU.kind_of(0), measured) == pytest.approx(1.0 + 4.0)
    together = added_seconds(sizes, CPU.kind_of(0), table())
    assert together == pytest.approx(sum(sizes) / (0.7 * 10e9))  # through the memory


def test_shares_by_source_add_up_to_all_seconds():
    prices = price(program(), GRAPH, CPU, table())
    assert sum(s for _, s in prices.by_source()) == pytest.approx(prices.seconds.sum())
    assert dict(prices.by_source())["measured"] > 0.99 * prices.seconds.sum()


def test_without_measurements_everything_is_modelled_and_says_so():
    prices = price(program(), GRAPH, CPU, CostTable())
    busy = prices.seconds > 0
    assert set(prices.source[busy]) == {2}
    assert bool((prices.seconds[[0, 1, 3, 4, 6]] > 0).all())


def brute_force(cluster: Cluster, mesh: Mesh, axes: tuple[int, ...]) -> set[tuple[int, int]]:
    """Return (hosts, sharing groups) of every peer group, by the definition of peers."""
    groups = {tuple(sorted(mesh.peers(device, axes))) for device in mesh.devices}
    spans = {group: {cluster.devices[d].host for d in group} for group in groups}
    found = set()
    for hosts in spans.values():
        if len(hosts) == 1:
            found.add((1, 1))
            continue
        sharing = max(
            sum(host in other and len(other) > 1 for other in spans.values()) for host in hosts
        )
        found.add((len(hosts), sharing))
    return found


@pytest.mark.parametrize("axes", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)])
@pytest.mark.parametrize("sizes", [(2, 4, 4), (4, 2, 4), (8, 2, 2)])
def test_peer_groups_count_who_shares_an_uplink(sizes, axes):
    cluster = parse_cluster("4x8xH100")
    mesh = Mesh(axes=("a", "b", "c"), sizes=sizes, devices=tuple(range(32)))
    found = {
        (len({cluster.devices[d].host for d in devices}), concurrent)
        for devices, concurrent in peer_groups(cluster, mesh, axes)
    }
    assert found == brute_force(cluster, mesh, axes)


def language_model() -> OperatorGraph:
    """One whose loss over a vocabulary reads the scores twice, but has one gradient for them."""
    from tests.laws.models import model

    return model("gpt").captured.graph


@pytest.mark.parametrize("make", [residual, pytest.param(language_model, marks=pytest.mark.torch)])
def test_backward_takes_as_long_however_its_readers_are_cut_into_segments(
    make: Callable[[], OperatorGraph],
):
    """Gradients of a value with several readers are summed, in one segment or across segments."""
    graph = make()
    whole = seed_strategy(graph, Seed())

    def backward(strategy: Strategy) -> float:
        lowered = lower(graph, strategy)
        seconds = price(lowered, graph, CPU, CostTable()).seconds
        return float(seconds[lowered.kind == Kind.BACKWARD].sum())

    for index in range(len(graph.operators)):
        cut = replace(whole, recompute_operators=(index,))
        assert backward(cut) == pytest.approx(backward(whole), rel=1e-12)


def test_packing_takes_what_it_was_measured_to_take_on_cpus_only() -> None:
    graph = residual(batch=8, width=64, depth=1)
    plain = seed_strategy(graph, Seed(data=4))
    sync = replace(plain.gradient_sync, compressor="int8")
    program = lower(graph, replace(plain, gradient_sync=sync))
    points = {
        "int8": ((0.0, 1.0, 0.0), (1e4, 3.0, 0.0)),
        "int8 sum": ((0.0, 0.5, 0.0), (1e4, 0.5, 0.0)),
        "zeros": ((0.0, 0.2, 0.0), (1e4, 0.2, 0.0)),
    }
    table = CostTable(collectives=tuple((f"{PACK}|{name}", one) for name, one in points.items()))
    seen = dict[str, float]()
    gpus = parse_cluster("1x4xH100")
    for kind, item, here, there in zip(
        program.kind,
        program.item,
        price(program, graph, CPU, table).seconds,
        price(program, graph, gpus, table).seconds,
        strict=True,
    ):
        if kind == Kind.TRANSFORM:
            transform = program.transforms[item]
            values = [program.values[one] for one in transform.writes]
            sizes = [np.prod(one.shape) for one in values if one.dtype == "float32"]
            ways = {
                "int8": sum(1 + 2e-4 * size for size in sizes),
                "int8 sum": (0.2 + 4 * 0.5) * len(sizes),
            }
            assert here == pytest.approx(ways[transform.name])
            assert there < 1e-3
            seen[transform.name] = here
    assert {*seen, "zeros"} == set(points)


def test_selections_take_what_lies_between_densities_that_were_measured() -> None:
    graph = residual(batch=8, width=64, depth=1)
    plain = seed_strategy(graph, Seed(data=4))
    lines = [
        (f"{PACK}|{name}|{density:g}", ((1.0, seconds, 0.0), (1e4, seconds, 0.0)))
        for name, ends in (("top-k", (1.0, 3.0)), ("top-k sum", (0.5, 0.7)))
        for density, seconds in zip(PACK_DENSITIES, ends, strict=True)
    ]
    lines.append((f"{PACK}|zeros", ((1.0, 0.2, 0.0), (1e4, 0.2, 0.0))))
    table = CostTable(collectives=tuple(lines))
    for density, share in ((0.0005, 0.0), (0.001, 0.0), (0.0505, 0.5), (0.1, 1.0), (0.199, 2.0)):
        sync = replace(plain.gradient_sync, compressor="top-k", density=density)
        program = lower(graph, replace(plain, gradient_sync=sync))
        found = price(program, graph, CPU, table).seconds
        for kind, item, seconds in zip(program.kind, program.item, found, strict=True):
            if kind == Kind.TRANSFORM:
                one = program.transforms[item]
                each = {"top-k": 1 + 2 * share, "top-k sum": 0.2 + 4 * (0.5 + 0.2 * share)}[
                    one.name
                ]
                gradients = sum(program.values[place].dtype == "float32" for place in one.reads)
                expected = (gradients // 2 or len(one.writes)) * each  # gradients and residuals
                assert seconds == pytest.approx(expected, rel=2e-2)


@pytest.mark.parametrize(("kind", "starts"), [(Kind.FORWARD, 1.0), (Kind.BACKWARD, 1.5)])
def test_a_gpu_waits_for_a_host_that_is_slower_to_start_operators(kind: int, starts: float) -> None:
    graph = residual(depth=3)
    cluster = parse_cluster("1x1xH100")
    program = lower(graph, seed_strategy(graph, Seed()))
    place = list(program.kind).index(kind)
    slow, slower = (
        price(program, graph, cluster, CostTable(overheads=(("start_seconds", each),))).seconds
        for each in (0.01, 0.02)
    )
    operators = sum(1 for one in graph.operators if not one.kind.startswith("aten.view"))
    assert slower[place] == pytest.approx(2 * slow[place], rel=1e-6)
    assert 0.01 * starts <= slow[place] <= 0.01 * starts * (operators + 1)


def test_views_which_were_measured_start_nothing_on_a_gpu() -> None:
    table = CostTable(overheads=(("start_seconds", 0.01),))
    rates = Rates(cluster=parse_cluster("1x1xH100"), table=table)
    views = [Cost(seconds=2e-8, source="measured")] * 100
    costs = [Cost(seconds=2e-6, source="measured"), *views]
    assert started(total(costs), costs, "forward", rates).seconds == pytest.approx(0.01)


def test_a_host_that_nobody_measured_may_be_slower_and_the_half_width_says_so() -> None:
    cluster = parse_cluster("1x1xH100")
    fast, known = (
        Rates(cluster=cluster, table=CostTable(overheads=overheads))
        for overheads in ((), (("start_seconds", 5e-6),))
    )
    kernel = Cost(seconds=2e-5, spread=2e-6)
    one, many = (started(total([kernel] * n), [kernel] * n, "forward", fast) for n in (1, 50))
    usual = fast.software.host * fast.kind.launch_seconds
    assert (one.seconds, one.spread) == pytest.approx((2e-5, SLOW_HOST * usual - 2e-5))
    assert many.spread / many.seconds == pytest.approx(one.spread / one.seconds)
    assert started(kernel, [kernel], "forward", known) == kernel
    long = Cost(seconds=1e-3, spread=1e-4)
    assert started(long, [long], "forward", fast) == long


def test_rounds_of_pairs_cost_a_transfer_each_and_share_the_uplink_of_a_host() -> None:
    cluster = read_cluster(
        '[kind.c]\npeak = {float32 = "0.1 TFLOP/s"}\nmemory = "1 GB"\nbackend = "cpu"\n'
        'memory_bandwidth = "10 GB/s"\n[[host]]\ncount = 2\nname = "h"\nkind = "c"\ndevices = 2\n'
        'link = "2 GB/s"\nuplink = "1 Gbit/s"\n'
    )
    size, ends = 2**20, (cluster, CostTable())
    mesh = Mesh(axes=("data",), sizes=(4,), devices=(0, 1, 2, 3))
    beside, across = merge_rounds("gtop-k", 4)
    for one, devices, together in ((beside, (0, 1), 1), (across, (0, 2), 2)):
        alone = collective_seconds("transfer", size, devices, *ends, together)
        found = paired_seconds(mesh, (0,), one.pairs, size, ends)
        assert found.seconds == pytest.approx(alone.seconds)
