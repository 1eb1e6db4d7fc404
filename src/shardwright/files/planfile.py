"""The border where plans and graphs become files and come back.

A file is JSON: a header that pydantic checks (format, schema version, kind) around the nouns as
``core.codec`` writes them. Nothing in a file is executed, and whatever is wrong with one ends in a
single ``InputError`` or ``PlanMismatch`` with a remedy. Equal values give equal bytes.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shardwright.core.cluster import Cluster
from shardwright.core.codec import MAX_INTEGER, MAX_UNFOLDED, SCHEMA, decode, dumps, encode
from shardwright.core.graph import OperatorGraph
from shardwright.core.legality import check_against, check_alone
from shardwright.core.plan import Frontier, Plan
from shardwright.errors import InputError, PlanMismatch
from shardwright.files.limits import check_entries, read_bytes
from shardwright.files.units import is_in_range, range_text

FORMAT = "shardwright"
MAX_FILE_BYTES = 64 * 2**20
MOST_PLANS = 512
MOST_SAMPLES = 2**31
FOLDED = ("configs", "parameters")  # lists that are written as runs
AGAIN = "write the file again with `shardwright plan`"


class Unruled(BaseModel):
    """A kind of operator that no rule splits: how many there are, and their share of the modelled
    time of all operators (0 to 1)."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    kind: str = Field(max_length=4096)
    count: int = Field(ge=1, le=2**31)
    share: float = Field(ge=0.0, le=1.0)


class Origin(BaseModel):
    """Which model and batch the file was made for, so that a command can build them again.

    ``memory_limit`` is bytes per device, None for the devices' own; ``unruled`` is what of the model runs replicated, or as an opaque block, for want of a rule.
    ``factors`` were fitted to plans that ran (``CostTable.factors``).
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    model: str = Field(default="", max_length=4096)
    seq: int | None = Field(default=None, ge=1, le=2**31)
    optimizer: str = Field(default="adamw", max_length=64)
    memory_limit: float | None = Field(default=None, gt=0)
    unruled: list[Unruled] = Field(default_factory=list[Unruled], max_length=10_000)
    factors: dict[str, Annotated[float, Field(gt=0, lt=1e6)]] = Field(
        default_factory=dict[str, float], max_length=64
    )


class Header(BaseModel):
    """What every file must say about itself before its content is looked at."""

    model_config = ConfigDict(extra="forbid", strict=True)

    format: Literal["shardwright"]
    schema_version: int = Field(alias="schema", ge=0, le=2**31)
    kind: Literal["plan", "frontier", "graph"]
    content: dict[str, Any]
    origin: Origin = Origin()
    cluster: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFile:
    """A plan file's content: the plan or frontier, where it came from, and its cluster if kept; ``path`` is empty
    for what came in no file."""

    plans: Plan | Frontier
    origin: Origin
    cluster: Cluster | None
    path: str = ""

    @property
    def frontier(self) -> Frontier:
        """All plans of the file; a single plan is a frontier of one."""
        return self.plans if isinstance(self.plans, Frontier) else Frontier(plans=(self.plans,))

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Have whatever refuses a plan of this file name the file."""
        try:
            yield
        except PlanMismatch as error:
            if not self.path:
                raise
            raise PlanMismatch(f"{self.path}: {error}") from error


def write_plan(
    path: str | Path,
    plans: Plan | Frontier,
    *,
    origin: Origin | None = None,
    cluster: Cluster | None = None,
) -> Path:
    """Write a plan or a frontier, whole or not at all. Raises InputError when the disk refuses."""
    kind = "frontier" if isinstance(plans, Frontier) else "plan"
    body: dict[str, Any] = {"origin": _origin(origin or Origin())}
    if cluster is not None:
        body["cluster"] = encode(cluster)
    return _write(path, kind, plans, body)


def _origin(origin: Origin) -> dict[str, Any]:
    written = origin.model_dump()
    optional = ("unruled", "memory_limit", "factors")
    return {name: value for name, value in written.items() if value or name not in optional}


def write_graph(path: str | Path, graph: OperatorGraph) -> Path:
    """Write a captured graph, whole or not at all."""
    return _write(path, "graph", graph, {})


def read_plan(
    path: str | Path, graph: OperatorGraph | None = None, cluster: Cluster | None = None
) -> Plan | Frontier:
    """Read a plan or frontier; with a graph or cluster, refuse one that was made for another."""
    document = read_plan_file(path)
    with document.named():
        for plan in document.frontier.plans:
            check_fits(plan, graph, cluster)
    return document.plans


def read_plan_file(path: str | Path) -> PlanFile:
    """Read a plan file with its origin and cluster. Raises InputError or PlanMismatch."""
    header = _read_header(path)
    if header.kind == "graph":
        raise InputError(f"{path} holds a graph, but a plan is needed; {AGAIN}")
    try:
        _check_counts(header)
        plans: Plan | Frontier
        plans = decode(Frontier if header.kind == "frontier" else Plan, header.content, "content")
        if isinstance(plans, Frontier):
            plans = replace(plans, plans=tuple([plan.marked() for plan in plans.plans]))
        else:
            plans = plans.marked()
        cluster = None if header.cluster is None else decode(Cluster, header.cluster, "cluster")
        if cluster is not None:
            _check_cluster(cluster)
        document = PlanFile(plans=plans, origin=header.origin, cluster=cluster, path=str(path))
        if not document.frontier.plans:
            raise ValueError("content.plans: the frontier is empty")
        for plan in document.frontier.plans:
            if not 1 <= plan.global_batch <= MOST_SAMPLES:
                raise ValueError(
                    f"content.global_batch: a step has 1 to {MOST_SAMPLES:,} samples, not "
                    f"{plan.global_batch:,}"
                )
            check_alone(plan.strategy)
            if cluster is not None and plan.strategy.devices[-1] >= cluster.num_devices:
                raise ValueError(
                    f"content.strategy.meshes: device {plan.strategy.devices[-1]} is not among the "
                    f"{cluster.num_devices} of the file's cluster"
                )
    except (ValueError, RecursionError) as error:
        _refuse(path, error)
    return document


def read_graph(path: str | Path) -> OperatorGraph:
    """Read a captured graph. Raises InputError or PlanMismatch."""
    header = _read_header(path)
    if header.kind != "graph":
        raise InputError(
            f"{path} holds a plan, but a graph is needed; write one with `shardwright capture`"
        )
    try:
        return decode(OperatorGraph, header.content, "content")
    except (ValueError, IndexError, RecursionError) as error:
        _refuse(path, error)


def check_fits(
    plan: Plan, graph: OperatorGraph | None = None, cluster: Cluster | None = None
) -> None:
    """Raise PlanMismatch with a list of what differs unless the plan is for this graph and
    cluster."""
    differences: list[str] = []
    strategy = plan.strategy
    if graph is not None and graph.fingerprint != plan.graph_fingerprint:
        differences += _model_differences(plan, graph)
    if cluster is not None and cluster.fingerprint != plan.cluster_fingerprint:
        differences.append(
            f"cluster: plan {_cluster_text(plan)}, here {cluster.name} {cluster.fingerprint}"
        )
    if cluster is not None and strategy.devices[-1] >= cluster.num_devices:
        differences.append(f"devices: plan {strategy.devices[-1] + 1}, here {cluster.num_devices}")
    if differences:
        raise PlanMismatch(
            f"a plan runs only on the model and cluster it was made for, but this one differs in "
            f"{'; '.join(differences)}; plan again with `shardwright plan`, or give the model, "
            "batch and cluster of the plan"
        )
    if graph is not None:
        try:
            check_against(strategy, graph)
        except ValueError as error:
            raise PlanMismatch(f"the plan does not fit its model: {error}; {AGAIN}") from error


def _cluster_text(plan: Plan) -> str:
    return f"{plan.cluster_name} {plan.cluster_fingerprint}"


def _model_differences(plan: Plan, graph: OperatorGraph) -> list[str]:
    found = [
        f"graph: plan {plan.model} {plan.graph_fingerprint}, here {graph.name} {graph.fingerprint}"
    ]
    counts = (
        ("operators", len(plan.strategy.configs), len(graph.operators)),
        ("parameters", len(plan.strategy.parameters), len(graph.parameters)),
    )
    found += [f"{name}: plan {was}, here {now}" for name, was, now in counts if was != now]
    sizes = {graph.tensors[index].shape[0] for index in graph.inputs if graph.tensors[index].shape}
    if sizes and plan.global_batch not in sizes:
        found.append(f"global batch: plan {plan.global_batch}, here {min(sizes)}")
    return found


def _check_counts(header: Header) -> None:
    """Check how many plans a file holds and how long their lists would become. Raises ValueError."""
    plans: Any = header.content.get("plans") if header.kind == "frontier" else [header.content]
    if not isinstance(plans, list):
        return  # decoding says what is wrong
    if len(plans) > MOST_PLANS:
        raise ValueError(f"content.plans: at most {MOST_PLANS} plans, not {len(plans):,}")
    count = 0
    for plan in plans:
        strategy = plan.get("strategy") if isinstance(plan, dict) else None
        lists = [strategy.get(name) for name in FOLDED] if isinstance(strategy, dict) else []
        for runs in [one.get("runs") for one in lists if isinstance(one, dict)]:
            for run in runs if isinstance(runs, list) else ():
                count += run[-1] if isinstance(run, list) and run and type(run[-1]) is int else 0
    if count > MAX_UNFOLDED:
        raise ValueError(
            f"content: the strategies of all plans together have at most {MAX_UNFOLDED:,} entries"
        )


def _check_cluster(cluster: Cluster) -> None:
    """Check the references and numbers of a cluster, as reading a cluster file does. Raises ValueError."""
    kinds, switches = range(len(cluster.kinds)), range(len(cluster.switches))
    if any(device.kind not in kinds or device.host not in switches for device in cluster.devices):
        raise ValueError("cluster.devices: a device names a kind or host that is not there")
    if any(not kind.peak_flops for kind in cluster.kinds):
        raise ValueError("cluster.kinds: a kind needs peak rates")
    _check_numbers(cluster)


def _check_numbers(cluster: Cluster) -> None:
    """Check that a cluster's numbers can be calculated with. Raises ValueError."""
    links = {device.link for device in cluster.devices}
    links |= {switch.link for switch in cluster.switches if switch.link is not None}
    needed = [rate for kind in cluster.kinds for _, rate in kind.peak_flops]
    needed += [size for k in cluster.kinds for size in (k.memory_bytes, k.memory_bandwidth)]
    needed += [link.bandwidth for link in links]
    free = [link.latency for link in links]
    free += [kind.launch_seconds for kind in cluster.kinds]
    free += [switch.dollars_per_second for switch in cluster.switches]
    free += (*cluster.input_rates, cluster.host_cores)
    for numbers, zero in ((needed, False), (free, True)):
        wrong = [number for number in numbers if not is_in_range(number, zero=zero)]
        if wrong:
            raise ValueError(
                f"cluster: rates, sizes, times and prices are {range_text(zero=zero)}, not {wrong[0]:g}"
            )


def _write(path: str | Path, kind: str, content: object, extra: dict[str, Any]) -> Path:
    body = {"format": FORMAT, "schema": SCHEMA, "kind": kind, "content": encode(content), **extra}
    return write_atomically(path, dumps(body).encode())


def write_atomically(path: str | Path, data: bytes) -> Path:
    """Write a file whole or not at all. Raises InputError when the disk refuses."""
    target = Path(path)
    spare = ""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, spare = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(spare, 0o644)
        os.replace(spare, target)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(spare)
        raise InputError(
            f"cannot write {target}: {error.strerror or error}; free some space or choose another "
            "path"
        ) from error
    return target


def _read_header(path: str | Path) -> Header:
    data = read_bytes(path, MAX_FILE_BYTES, "a plan file", AGAIN)
    try:
        check_entries(data, "a plan file")
        tree = _parse(data)
        if isinstance(tree, dict) and tree.get("format") == FORMAT:
            _check_schema(path, tree.get("schema"))
        return Header.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        value = first["input"]
        found = f", not {str(value)[:60]!r}" if isinstance(value, str | int | float) else ""
        _refuse(path, ValueError(f"{place}: {first['msg']}{found}"))
    except (ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        _refuse(path, error)


def _check_schema(path: str | Path, version: object) -> None:
    if isinstance(version, int) and not isinstance(version, bool) and version != SCHEMA:
        shown = version if abs(version) < MAX_INTEGER else "a huge number"
        raise PlanMismatch(
            f"this shardwright reads schema {SCHEMA}, but {path} has schema {shown}; {AGAIN}, or "
            "use the version that wrote it"
        )


def _parse(data: bytes) -> Any:
    """Parse JSON that hides nothing: no duplicate keys, no NaN, no numbers beyond their types."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(items)
        if len(table) != len(items):
            raise ValueError("a key occurs twice in one object")
        return table

    def integer(text: str) -> int:
        if len(text) > 20:
            raise ValueError(f"an integer has {len(text)} digits")
        return int(text)

    def number(text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            raise ValueError("a number is not finite")
        return value

    def constant(text: str) -> NoReturn:
        raise ValueError(f"{text} is not a JSON number")

    return json.loads(
        data.decode("utf-8"),
        object_pairs_hook=pairs,
        parse_int=integer,
        parse_float=number,
        parse_constant=constant,
    )


def _refuse(path: str | Path, error: Exception) -> NoReturn:
    """Say in one line why a file is refused."""
    if isinstance(error, RecursionError):
        reason = "it is nested too deeply"
    elif isinstance(error, json.JSONDecodeError):
        reason = (
            f"it is not complete JSON ({error.msg} at line {error.lineno} column {error.colno})"
        )
    elif isinstance(error, UnicodeDecodeError):
        reason = f"it is not UTF-8 text (byte {error.start})"
    else:
        reason = str(error)[:400]
    raise InputError(f"{path} is not a plan file that can be used: {reason}; {AGAIN}") from error
