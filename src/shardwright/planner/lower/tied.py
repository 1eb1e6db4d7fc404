"""Parameters that several meshes read: they travel from their home, and their gradients back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from shardwright.core.crossing import crosses_flat
from shardwright.core.layout import FLAT, Layout, unflattened
from shardwright.planner.lower.builder import ProgramBuilder, Step
from shardwright.planner.lower.parameters import Parameters
from shardwright.planner.lower.stage import Entry, Stage
from shardwright.planner.lower.transfers import transfer
from shardwright.planner.lower.wire import other_dtype, synchronise


def move_tied(parameters: Parameters, stages: Sequence[Stage], exchange: list[list[Step]]) -> None:
    """Send a parameter used on several meshes from its home, and its gradients back.

    The gradient is summed up over the mesh it was made on first, in the optimizer's layout where
    that mesh has one like it, and then added to the reduced gradient at home. Entries of ``stages``
    and the ``exchange`` of each behind all microbatches are appended to.
    """
    builder = parameters.builder
    builder.make_for("moved parameters")
    leaving: dict[int, int] = {}  # the value that each parameter at rest leaves its home from
    for use in list(parameters.uses.values()) if len(stages) > 1 else ():
        kept, value = parameters.kept[use.tensor], builder.values[use.value]
        if use.mesh == kept.mesh or use.tensor in parameters.served:
            continue
        if value.alias < 0:
            gather: list[Step] = []
            if kept.rest not in leaving:
                leaving[kept.rest], gather = builder.once(
                    ("whole", kept.rest), partial(whole, builder, kept.rest)
                )
            ends = (leaving[kept.rest], use.value)
            send, receive = builder.once(
                ("tied", *ends), partial(transfer, builder, *ends, "parameter")
            )
            stages[kept.mesh].prologue.append(Entry(-1, [*gather, send]))
            stages[use.mesh].prologue.append(Entry(-1, [receive]))
        if value.gradient >= 0:
            summed = parameters.summed_abroad(use)
            arriving, cut = builder.once(
                ("arrived", summed, kept.reduced), partial(arrived, builder, summed, kept.reduced)
            )
            ends = (summed, arriving)
            send, receive = builder.once(
                ("tied", *ends), partial(transfer, builder, *ends, "synchronise")
            )
            exchange[use.mesh].append(send)
            exchange[kept.mesh] += [receive, *cut]
    builder.make_for(None)


def whole(
    builder: ProgramBuilder, rest: int, wanted: Layout | None = None
) -> tuple[int, list[Step]]:
    """Return the value that a parameter leaves its home from, and the steps that make it: flat
    shards are gathered first, since no other mesh is cut as they are, unless a mesh that it is
    ``wanted`` whole on may take them one by one."""
    value = builder.values[rest]
    if FLAT not in value.layout or (wanted and crosses_flat(value.layout, wanted)):
        return rest, []
    gathered = builder.add_value(
        value.tensor, value.mesh, unflattened(value.layout), "step", "parameter"
    )
    return gathered, builder.chain([(rest, gathered)], "parameter")


def arrived(
    builder: ProgramBuilder, summed: int, reduced: int, *, is_served: bool = False
) -> tuple[int, list[Step]]:
    """Return where a gradient arrives from another mesh, and the steps that add it to the
    reduced one: at once, except in another dtype, or to flat shards on a mesh that is cut otherwise,
    to which a server adds terms one by one where it may."""
    one, other = builder.values[summed], builder.values[reduced]
    same = builder.mesh(one.mesh).sizes == builder.mesh(other.mesh).sizes
    wire = other_dtype(builder, summed)
    is_cut = FLAT in other.layout and not (same and one.layout == other.layout)
    is_cut &= not (is_served and crosses_flat(other.layout, one.layout))
    if not is_cut and wire in ("", other.dtype):
        return reduced, []
    layout = unflattened(other.layout) if is_cut else other.layout
    arriving = builder.add_value(
        other.tensor, other.mesh, layout, "step", "gradient", dtype=wire or other.dtype
    )
    return arriving, synchronise(builder, [(arriving, reduced)])
