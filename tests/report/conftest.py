"""A small hand-made story: two stages, two microbatches, one transfer each way."""

from __future__ import annotations

import numpy as np
import pytest

from shardwright.core.cluster import Cluster, Device, DeviceKind, Link, Switch
from shardwright.core.explanation import Decision, Reasons, ShadowPrice
from shardwright.core.graph import Operator, OperatorGraph, TensorSpec
from shardwright.core.plan import Bound, Objective, Plan
from shardwright.core.program import Kind, Message, Program, Segment, Value, resource_classes
from shardwright.core.strategy import Mesh, OperatorConfig, ParameterConfig, Pipeline, Strategy
from shardwright.core.timeline import Timeline
from shardwright.report.critical import CriticalRow
from shardwright.report.reasons import why
from shardwright.report.story import OperatorRow, PlanStory, Story
from shardwright.report.why import Why

MIB = 2**20
# Each row: its kind, stage, item, microbatch, resource, start, end and predecessors.
INSTRUCTIONS = (
    (Kind.FORWARD, 0, 0, 0, 0, 0.0, 1.0, ()),
    (Kind.SEND, 0, 0, 0, 1, 1.0, 1.2, (0,)),
    (Kind.FORWARD, 0, 0, 1, 0, 1.0, 2.0, (0,)),
    (Kind.RECEIVE, 1, 0, 0, 3, 1.0, 1.2, (1,)),
    (Kind.FORWARD, 1, 1, 0, 2, 1.2, 2.2, (3,)),
    (Kind.BACKWARD, 1, 1, 0, 2, 2.2, 4.2, (4,)),
    (Kind.MESSAGE, 1, 1, -1, 3, 4.2, 4.5, (5,)),
    (Kind.UPDATE, 1, -1, -1, 2, 4.5, 5.0, (6,)),
)


def make_program(strategy: Strategy) -> Program:
    columns = list(zip(*INSTRUCTIONS, strict=True))
    predecessors = columns[7]
    offset = np.concatenate([[0], np.cumsum([len(p) for p in predecessors])])
    count = len(INSTRUCTIONS)
    names = ("compute:0", "send:0-1", "compute:1", "receive:0-1")
    value = Value(
        tensor=1, mesh=0, layout=(-1,), shape=(512, 512), dtype="float32", scope="step",
        role="parameter", resident=True,
    )  # fmt: skip
    segment = Segment(mesh=0, block=0, calls=(), inputs=(), outputs=(), has_backward=True)
    transfer = Message(
        primitive="transfer", mesh=0, axes=(), sources=(0,), results=(0,), dims=((-1, -1),),
        bytes=1024, purpose="activation", destination=1,
    )  # fmt: skip
    reduce = Message(
        primitive="all_reduce", mesh=1, axes=(0,), sources=(0,), results=(0,), dims=((-1, -1),),
        bytes=4096, purpose="synchronise",
    )  # fmt: skip
    return Program(
        strategy=strategy,
        values=(value,),
        segments=(segment, segment),
        messages=(transfer, reduce),
        loss=0,
        kind=np.array(columns[0], dtype=np.int8),
        group=np.array(columns[1], dtype=np.int32),
        item=np.array(columns[2], dtype=np.int32),
        microbatch=np.array(columns[3], dtype=np.int32),
        resource=np.array(columns[4], dtype=np.int32),
        resource_names=names,
        resource_class=resource_classes(names),
        offset=offset.astype(np.int64),
        predecessor=np.array([p for ps in predecessors for p in ps], dtype=np.int32),
        free_offset=np.zeros(count + 1, dtype=np.int64),
        free_value=np.zeros(0, dtype=np.int32),
        allocated=np.zeros(count, dtype=np.int64),
        freed=np.zeros(count, dtype=np.int64),
        temporary=np.zeros(count, dtype=np.int64),
        base_bytes=(4 * MIB, 4 * MIB),
    )


def make_timeline(program: Program, source: str, stretch: float) -> Timeline:
    columns = list(zip(*INSTRUCTIONS, strict=True))
    memory = np.array([[0.0, 4 * MIB], [1.0, 9 * MIB], [4.0, 5 * MIB]])
    return Timeline(
        source="measured" if source == "measured" else "simulated",
        start=np.array(columns[5]) * stretch,
        end=np.array(columns[6]) * stretch,
        group=program.group,
        memory=(memory, memory),
        peak_bytes=(9.0 * MIB, 9.0 * MIB),
        step_seconds=5.0 * stretch,
    )


def make_story(name: str = "model") -> Story:
    tensors = (
        TensorSpec(name="x", shape=(4, 2), dtype="float32", role="input"),
        TensorSpec(name=f"{name}.w", shape=(3, 2), dtype="float32", role="parameter"),
        TensorSpec(name="y", shape=(4, 3), dtype="float32", role="activation", producer=0),
    )
    operator = Operator(
        name=name, kind="aten.linear", inputs=(0, 1), input_names=("input", "weight"), outputs=(2,)
    )
    graph = OperatorGraph(name, tensors, (operator,), (), 2, (f"note on {name}",))
    device = Device(kind=0, host=0, link=Link(latency=0, bandwidth=1e9))
    kind = DeviceKind(
        name="c", peak_flops=(("float32", 1e9),), memory_bytes=16 * MIB, memory_bandwidth=1e9
    )
    cluster = Cluster(name, (kind,), (Switch(name="h"),), (device,) * 4)
    stories: list[PlanStory] = []
    for index, (seconds, peak) in enumerate(((5.0, 9 * MIB), (7.5, 6 * MIB))):
        meshes = tuple(Mesh(axes=("data",), sizes=(2,), devices=(2 * i, 2 * i + 1)) for i in (0, 1))
        strategy = Strategy(
            meshes=meshes,
            configs=(OperatorConfig(mesh=0, dims=("b",)),),
            parameters=(ParameterConfig(rest=(-1,), optimizer=(0,)),),
            pipeline=Pipeline(num_microbatches=2),
            label=f"{name} plan {index}",
        )
        plan = Plan(
            strategy=strategy,
            predicted=Objective(step_seconds=seconds, peak_bytes=peak, dollars=0.002),
            model=name,
            graph_fingerprint=graph.fingerprint,
            cluster_name=name,
            cluster_fingerprint=cluster.fingerprint,
            costs_fingerprint="k",
            global_batch=4,
            method="m",
            seed=0,
            version="1",
            reason=f"Because of {name}.",
            bound=Bound(step_seconds=4.0, gap=0.2, model="without overlap"),
            sources=(("measured", 4.0), ("modelled", 1.0)),
            notes=(f"a note about {name}",),
        )
        program = make_program(strategy)
        stories.append(
            PlanStory(
                plan=plan,
                program=program,
                predicted=make_timeline(program, "simulated", 1.0 + 0.5 * index),
                measured=make_timeline(program, "measured", 1.1) if index == 0 else None,
                spread_seconds=0.2,
                operators=tuple(make_row(f"{name}.h.{i}.up", i) for i in range(3)),
                why=make_why(plan, name, index == 0),
            )
        )
    return Story(
        graph=graph,
        cluster=cluster,
        plans=tuple(stories),
        losses=(("this plan", (3.0, 2.5, 2.1)), ("one process", (3.0, 2.5, 2.1))),
        provenance=(("hardware", name),),
    )


def make_why(plan: Plan, name: str, is_chosen: bool) -> Why:
    """One decision, two prices and two critical rows; the plan that is not chosen has the last."""
    critical = (
        CriticalRow(what=f"{name} forward work", where="forward", seconds=3.5),
        CriticalRow(what="all_reduce (synchronise)", where="between hosts", seconds=1.5),
    )
    if not is_chosen:
        return why(plan, critical, None)
    decision = Decision(
        what=f"split of {name}", chosen="b over data", runner_up="n over data", added_seconds=0.5,
        added_bytes=1e6, count=3, step_seconds=5.5, peak_bytes=12.0 * MIB,
    )  # fmt: skip
    prices = (
        ShadowPrice(what="2 GiB more per device", step_seconds=4.8, label="another plan"),
        ShadowPrice(what="a link twice as fast", step_seconds=4.5),
    )
    reasons = Reasons(
        decisions=(decision,),
        prices=prices,
        byte_seconds=0.0,
        notes=(f"{name} could not be priced",),
    )
    return why(plan, critical, reasons, 10.0 * MIB)


def make_row(name: str, index: int) -> OperatorRow:
    return OperatorRow(
        name=name, kind="aten.linear", stage=0, split="b over data (2)", shape="2x3",
        forward_seconds=0.1 * (index + 1), backward_seconds=0.2, source="measured",
    )  # fmt: skip


@pytest.fixture
def story() -> Story:
    return make_story()


@pytest.fixture
def hostile_story() -> Story:
    """Every name tries to break out of the page."""
    return make_story(
        "</script><script>document.title='broken'</script><img src=x onerror=alert(1)>"
    )


@pytest.fixture
def bracket_story() -> Story:
    """Names that rich would take for markup."""
    return make_story("[bold red]layer")
