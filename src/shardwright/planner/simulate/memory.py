"""Bytes alive over time, in the order in which devices run their instructions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shardwright.core.completion import asked_ahead, completions
from shardwright.core.program import Kind, Message, Program
from shardwright.core.strategy import crews_of, sorts_of_devices
from shardwright.planner.schedule.program import shares_devices
from shardwright.planner.simulate.columns import Bytes, Floats


def _traits(messages: Sequence[Message]) -> NDArray[np.int64]:
    """Return what of messages memory depends on, in columns of one entry each.

    They are: bytes copied out on arrival, whether it splits its only source without packing it, bytes
    of a reduce-scatter, whether that is of gradients.
    """
    rows: list[tuple[int, bool, int, bool]] = []
    for message in messages:
        name = message.primitive
        arrives = name in ("all_gather", "all_to_all") and message.is_unpacked
        splits = name in ("all_to_all", "reduce_scatter") and not message.is_packed
        size = message.bytes if name == "reduce_scatter" else 0
        scatters = name == "reduce_scatter" and message.scatters_gradients
        rows.append((message.bytes if arrives else 0, splits, size, scatters))
    return np.array(rows, dtype=np.int64).reshape(-1, 4).T


def memory_over_time(
    program: Program,
    times: tuple[Floats, Floats],
    scatter_copies: float = 0.0,
) -> tuple[Floats, ...]:
    """Return, per mesh, rows (seconds, bytes alive on its fullest device) in time order.

    The devices of a mesh are alike, unless some belong to further meshes: those hold more.

    Bytes come and go in the order in which a device's host runs its instructions, which is index
    order: ``allocated`` and ``temporary`` appear as it comes to an instruction, ``freed`` goes as
    it is done with it. The ``temporary`` of what computes goes then too; that of a message, with
    ``scatter_copies`` times the payload of a reduce-scatter, stays until the message is completed
    (``core.completion``), and so does what a message frees that is sent from where it lies. What is
    copied out of a buffer is there twice for that moment. The clock only says when that is; the
    first row is the base at time 0.
    """
    # Late, because importing Numba takes long.
    from shardwright.planner.simulate.host import device_rows

    bytes_ = touched(program, scatter_copies)
    touches = (bytes_.allocated != 0) | (bytes_.freed != 0) | (bytes_.held != 0) | bytes_.local
    touching = np.flatnonzero(touches)
    group = program.group[touching]
    found = touching[np.argsort(group, kind="stable")]
    ends = np.cumsum(np.bincount(group, minlength=len(program.meshes)))
    rows: dict[frozenset[int], Floats] = {}
    result: list[Floats] = []
    for kinds in device_kinds(program):
        for meshes in kinds - rows.keys():
            parts = [found[ends[mesh - 1] if mesh else 0 : ends[mesh]] for mesh in sorted(meshes)]
            mine = parts[0] if len(parts) == 1 else np.sort(np.concatenate(parts))
            base = sum(program.base_bytes[mesh] for mesh in meshes)
            rows[meshes] = device_rows(bytes_, *times, mine, base)
        result.append(max((rows[meshes] for meshes in kinds), key=lambda one: one[:, 1].max()))
    return tuple(result)


def touched(program: Program, scatter_copies: float) -> Bytes:
    """Return the columns that memory depends on, of one type each: Numba compiles once for each."""
    local = program.computes
    unpacked, in_place, scattered, scatters = _traits(program.messages)
    # A Program made for its times alone lists no messages.
    messages = np.flatnonzero((program.kind == Kind.MESSAGE) & bool(program.messages))
    items = program.item[messages]
    held = program.temporary.copy()
    # What the backend needs beside the buffers of its callers.
    held[messages] += (scatter_copies * scattered[items].astype(np.float64)).astype(np.int64)
    until = completions(program, scatters > 0, on_host=scatter_copies > 0)
    until = np.where(local, np.arange(program.num_instructions), until)
    lent = program.kind == Kind.SEND
    lent[messages] |= in_place[items] > 0
    copied = np.zeros(program.num_instructions, dtype=np.int64)
    copied[messages] = unpacked[items]
    copied[local] = 0
    allocated, freed = (
        np.require(column, np.int64, ["C", "W"]) for column in (program.allocated, program.freed)
    )
    if scatter_copies:  # ranks on CPUs
        places, coming = asked_ahead(program)
        allocated = allocated.copy()
        np.add.at(allocated, places, allocated[coming])
        allocated[coming] = 0
    return Bytes(allocated, freed, held, copied, until, lent, local)


def device_kinds(program: Program) -> list[frozenset[frozenset[int]]]:
    """Return, per mesh, its devices' sorts: the sets of meshes that they belong to."""
    if not shares_devices(program.meshes):
        return [frozenset({frozenset({number})}) for number in range(len(program.meshes))]
    crews = crews_of(program.meshes)
    sorts = sorts_of_devices(crews)
    kinds = {devices: frozenset(map(sorts.__getitem__, devices)) for devices in crews}
    return [kinds[mesh.devices] for mesh in program.meshes]
