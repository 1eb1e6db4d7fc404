"""What pipelines and microbatches of a framework are like where a published run does not say."""

from __future__ import annotations

from shardwright.files.runs import PublishedRun
from shardwright.verbs.dimensions import is_titan, names, software_of

# The fewest chunks of a stage where Megatron's pipelines do not say theirs: tuned ones interleave, since they can.
USUAL_CHUNKS, INTERLEAVED_SINCE = 2, "2021-04"
# Since when torchtitan's pipelines take microbatches of one sample; before, as many as there are stages of devices.
SINGLE_SINCE = "2025-04"
# Frameworks whose recipes interleave as finely as they can: one layer a chunk (of six published, four have one);
# and Megatron's kin that never do.
FINELY = ("nemo",)
NEVER = ("deepspeed", "internevo", "neox")
# What a run whose microbatch was not published may have used: the fastest of these that fits.
MICROBATCHES = (1, 2, 4, 8, 16)


def chunks_of(run: PublishedRun, count: int, assumed: list[str]) -> int:
    """Return the chunks of each stage's devices; Megatron interleaves whole rounds of microbatches,
    torchtitan two chunks where it is told to."""
    stages = run.pp or 1
    if stages == 1 or run.vpp is not None:
        return (run.vpp or 1) if stages > 1 else 1
    could = _may_interleave(run, count % stages == 0)
    chunks = _usual_chunks(run, stages) if could else 1
    note = f"{chunks} chunks per stage" if chunks > 1 else "no interleaving"
    if note not in assumed:
        assumed.append(note)
    return chunks


def _usual_chunks(run: PublishedRun, stages: int) -> int:
    """Return the fewest chunks of equally many layers, the most where recipes cut finely; 1 for none."""
    if is_titan(run):
        return USUAL_CHUNKS
    each, left = divmod(run.layers, stages)
    if left:
        return 1
    fewest = max(each, 1) if names(run, FINELY) else USUAL_CHUNKS
    return next((count for count in range(fewest, each + 1) if each % count == 0), 1)


def _may_interleave(run: PublishedRun, is_whole: bool) -> bool:
    """Whether chunks are usual where microbatches come, or do not, in whole rounds."""
    if is_titan(run):
        return "interleaved" in run.notes.lower()
    is_older = "" < run.software_date < INTERLEAVED_SINCE
    is_other = software_of(run) != "megatron" or names(run, NEVER)
    return is_whole and not (is_older or is_other)


def usual_microbatches(run: PublishedRun, local: int) -> tuple[int, ...]:
    """Return the sizes of a microbatch that are possible where none was published, of so many samples."""
    stages = run.pp or 1
    if stages == 1 or not is_titan(run):
        return MICROBATCHES
    is_older = run.software_date < SINGLE_SINCE and local % stages == 0
    return (local // stages if is_older else 1,)
