"""Small Programs for tests: only the columns that the simulator reads mean anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from shardwright.core.program import Kind, Program, resource_classes
from shardwright.core.strategy import Mesh, Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One instruction; ``after`` are its predecessors' indices."""

    resource: str
    seconds: float = 0.0
    after: tuple[int, ...] = ()
    group: int = 0
    kind: Kind = Kind.FORWARD
    microbatch: int = -1
    allocated: int = 0
    freed: int = 0
    temporary: int = 0


def build_program(
    rows: Sequence[Row], base_bytes: tuple[int, ...] = ()
) -> tuple[Program, NDArray[np.float64]]:
    """Return the Program with these instructions, and their durations. One mesh per group."""
    num_groups = max([1, len(base_bytes), *(row.group + 1 for row in rows)])
    names = tuple(dict.fromkeys(row.resource for row in rows))
    meshes = tuple(
        Mesh(axes=("data",), sizes=(1,), devices=(group,)) for group in range(num_groups)
    )
    program = Program(
        strategy=Strategy(meshes=meshes, configs=(), parameters=()),
        values=(),
        segments=(),
        messages=(),
        loss=-1,
        kind=np.array([row.kind for row in rows], dtype=np.int8),
        group=np.array([row.group for row in rows], dtype=np.int32),
        item=np.full(len(rows), -1, dtype=np.int32),
        microbatch=np.array([row.microbatch for row in rows], dtype=np.int32),
        resource=np.array([names.index(row.resource) for row in rows], dtype=np.int32),
        resource_names=names,
        resource_class=resource_classes(names),
        offset=np.cumsum([0, *(len(row.after) for row in rows)], dtype=np.int64),
        predecessor=np.array([other for row in rows for other in row.after], dtype=np.int32),
        free_offset=np.zeros(len(rows) + 1, dtype=np.int64),
        free_value=np.zeros(0, dtype=np.int32),
        allocated=np.array([row.allocated for row in rows], dtype=np.int64),
        freed=np.array([row.freed for row in rows], dtype=np.int64),
        temporary=np.array([row.temporary for row in rows], dtype=np.int64),
        base_bytes=base_bytes or (0,) * num_groups,
    )
    return program, np.array([row.seconds for row in rows], dtype=np.float64)


KINDS = {
    "compute": Kind.FORWARD, "link": Kind.MESSAGE, "send": Kind.SEND, "host": Kind.FETCH,
    "copy": Kind.COPY,
}  # fmt: skip


@st.composite
def row_lists(draw: st.DrawFn, max_size: int = 14) -> list[Row]:
    """Draw instructions of up to three groups, each with a compute queue, one or two links, and input.

    Durations repeat and include zero, so that many things happen at one instant.
    """
    num_groups = draw(st.integers(1, 3))
    seconds = st.sampled_from([0.0, 0.5, 1.0, 1.0, 2.0, 0.3, 1e-3]) | st.floats(0, 10)
    rows: list[Row] = []
    for index in range(draw(st.integers(0, max_size))):
        group = draw(st.integers(0, num_groups - 1))
        queue = draw(st.sampled_from(["compute", "compute", "link", "send", "host", "copy"]))
        earlier = st.sets(st.integers(0, index - 1), max_size=3) if index else st.just(set[int]())
        size = st.integers(0, 0 if queue in ("host", "copy") else 9)  # of the device's memory
        kind = KINDS[queue]
        rows.append(
            Row(
                kind=kind,
                resource=f"{queue}:{group}",
                seconds=draw(seconds),
                after=tuple(sorted(draw(earlier))),
                group=group,
                allocated=draw(size),
                freed=draw(size),
                temporary=draw(size),
            )
        )
    return rows
