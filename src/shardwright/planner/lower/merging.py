"""gTop-k: of the sum of all devices' selections the largest, merged in rounds (Shi et al., ICDCS 2019).

In each round devices send to others what they hold, and merge it with what comes. In the end all hold the
same, and so write the same sum.
"""

from __future__ import annotations

from shardwright.core.compression import merge_rounds
from shardwright.planner.lower.builder import Step
from shardwright.planner.lower.lot import Lot


def merged(lot: Lot, mine: tuple[int, ...]) -> list[Step]:
    """Return the steps that merge what devices packed, and write the sums."""
    held, own, steps, feedback = mine, mine, list[Step](), lot.sync.feedback
    owed = lot.residuals if feedback.residual == "conserving" else ()
    compressor = lot.sync.compressor
    rounds = merge_rounds(compressor, lot.ranks)
    last = max(turn for turn, one in enumerate(rounds) if not one.replaces)
    for turn, one in enumerate(rounds):
        came, merging = lot.packs(), lot.packs()
        size = sum(lot.pack_bytes)
        steps.append(lot.message("send_receive", held, came, size, pairs=one.pairs))
        said = {
            "axes": lot.axes,
            "compressor": compressor,
            "dtype": lot.wide,
            "gradients": len(held),
            "ranks": lot.ranks,
            "turn": turn,
        }
        owing = () if one.replaces else owed
        # What of the merged is a device's own, as long as there is more to drop.
        left = lot.packs() if owing and turn < last else ()
        reads = (*held, *came, *(own if owing else ()))
        steps.append(lot.transform("merge", reads, (*merging, *left), owing, said=said))
        held, own = merging, left
    if feedback.residual == "paper":
        back = lot.transform(
            "take back", (*mine, *held), (), lot.residuals, said={"dtype": lot.wide}
        )
        steps.append(back)
    steps.append(
        lot.transform("top-k sum", held, lot.results, said={"dtype": lot.wide, "ranks": 1})
    )
    return steps
