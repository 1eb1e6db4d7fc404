"""What travels from one mesh to another: a message with its two steps."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.core.program import Kind, Message, Purpose
from shardwright.planner.cost.transfers import moved_bytes
from shardwright.planner.lower.builder import ProgramBuilder, Step


def transfer(
    builder: ProgramBuilder, source: int, result: int, purpose: Purpose
) -> tuple[Step, Step]:
    """Append a transfer between meshes and return its send and receive steps."""
    return transfer_all(builder, [(source, result)], purpose)


def transfer_all(
    builder: ProgramBuilder, pairs: Sequence[tuple[int, int]], purpose: Purpose
) -> tuple[Step, Step]:
    """Append a transfer of (source, result) pairs between two meshes, which travel together."""
    sources, results = (tuple([pair[end] for pair in pairs]) for end in (0, 1))
    here, there = builder.values[sources[0]].mesh, builder.values[results[0]].mesh
    item = builder.add_message(
        Message(
            primitive="transfer",
            mesh=here,
            axes=(),
            sources=sources,
            results=results,
            dims=((-1, -1),) * len(pairs),
            bytes=_most_moved(builder, pairs),
            purpose=purpose,
            destination=there,
        )
    )
    builder.external.update(sources)
    # Chunks of the same devices share their links.
    ends = f"{builder.links[here]}-{builder.links[there]}"
    send = Step(kind=Kind.SEND, item=item, resource=f"send:{ends}", reads=sources)
    # What arrives of a gradient is added to it: after all that was done to it here.
    receive = Step(
        kind=Kind.RECEIVE,
        item=item,
        resource=f"receive:{ends}",
        reads=results if purpose == "synchronise" else (),
        writes=results,
    )
    return send, receive


def _most_moved(builder: ProgramBuilder, pairs: Sequence[tuple[int, int]]) -> int:
    """Bytes of the device that sends or receives most: chunks of pipelines ask for the same many times."""
    ends = [(builder.values[source], builder.values[result]) for source, result in pairs]
    here, there = (builder.mesh(one.mesh) for one in ends[0])
    told = [(one.shape, one.layout, one.dtype, other.shape, other.layout) for one, other in ends]
    key, known = (here, there, tuple(told)), builder.ground.moved
    if key not in known:
        sent, received = dict[int, int](), dict[int, int]()
        for (sender, receiver), size in moved_bytes(ends, here, there).items():
            sent[sender] = sent.get(sender, 0) + size
            received[receiver] = received.get(receiver, 0) + size
        known[key] = max((*sent.values(), *received.values()), default=0)
    return known[key]
