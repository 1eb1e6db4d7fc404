"""What travels from one mesh to another: a message with its two steps."""

from __future__ import annotations

from shardwright.core.graph import DTYPE_BYTES
from shardwright.core.program import Kind, Message, Purpose, value_pieces
from shardwright.planner.lower.builder import ProgramBuilder, Step


def transfer(
    builder: ProgramBuilder, source: int, result: int, purpose: Purpose
) -> tuple[Step, Step]:
    """Append a transfer between meshes and return its send and receive steps."""
    here, there = builder.values[source].mesh, builder.values[result].mesh
    builder.messages.append(
        Message(
            primitive="transfer",
            mesh=here,
            axes=(),
            sources=(source,),
            results=(result,),
            dims=((-1, -1),),
            bytes=_most_moved(builder, source, result),
            purpose=purpose,
            destination=there,
        )
    )
    builder.external.add(source)
    item = len(builder.messages) - 1
    # Chunks of the same devices share their links.
    ends = f"{builder.links[here]}-{builder.links[there]}"
    send = Step(kind=Kind.SEND, item=item, resource=f"send:{ends}", reads=(source,))
    # What arrives of a gradient is added to it: after all that was done to it here.
    receive = Step(
        kind=Kind.RECEIVE,
        item=item,
        resource=f"receive:{ends}",
        reads=(result,) if purpose == "synchronise" else (),
        writes=(result,),
    )
    return send, receive


def _most_moved(builder: ProgramBuilder, source: int, result: int) -> int:
    """Bytes of the device that sends or receives most; what stays on its device is no traffic."""
    one, other = builder.values[source], builder.values[result]
    here, there = builder.mesh(one.mesh), builder.mesh(other.mesh)
    if here.sizes == there.sizes and one.layout == other.layout:
        # Every device sends its shard to the one at its place (``pieces_between``).
        return 0 if here.devices == there.devices else builder.value_bytes(source)
    moved: dict[tuple[str, int], int] = {}
    for piece in value_pieces(one, here, other, there):
        if piece.source != piece.destination:
            for end in (("out", piece.source), ("in", piece.destination)):
                moved[end] = moved.get(end, 0) + piece.num_elements
    return max(moved.values(), default=0) * DTYPE_BYTES[one.dtype]
