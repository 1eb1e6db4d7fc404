"""A published run with what its own cells tell, where the cells meant for it are blank or in other words.

Sources print the same thing in many ways: a batch in tokens, a date as a container's version, a degree
that counts another one. All that is read here, before the run is planned or scored.
"""

from __future__ import annotations

import re
from dataclasses import replace

from shardwright.files.runs import PublishedRun

# What no step trains on: so many samples, or tokens, of a step are tokens, or nonsense.
MOST_TOKENS = 10**9
MONTHS = "jan feb mar apr may jun jul aug sep oct nov dec".split()
# Since when releases of PyTorch 2 are there, by their second number.
RELEASES = ("2023-03", "2023-10", "2024-01", "2024-04", "2024-07", "2024-10", "2025-01", "2025-04",
            "2025-08", "2025-10")  # fmt: skip
# Software is no older than the device, and the framework, that it runs on: parts of names, newest first.
DEVICES = (("B300", "2025"), ("B200", "2025"), ("MI355", "2025"), ("H200", "2024"), ("MI300", "2024"),
           ("MI325", "2024"), ("H100", "2023"), ("H800", "2023"), ("H20", "2024"), ("L40", "2023"),
           ("L4", "2023"), ("4090", "2023"))  # fmt: skip
FRAMEWORKS = (("bridge", "2025"), ("veomni", "2025"), ("titan", "2024"), ("nanotron", "2024"),
              ("torchtune", "2024"), ("nemo 2", "2024"), ("fsdp2", "2024"))  # fmt: skip


def completed(run: PublishedRun, assumed: list[str]) -> PublishedRun:
    """Return a run whose date, degrees and batch are as the columns mean them, as far as it tells
    them; what had to be assumed is added to the list."""
    run = replace(run, software_date=_date(run, assumed))
    run = replace(run, dp=_data(run, assumed))
    return _with_batch(run, assumed)


def _date(run: PublishedRun, assumed: list[str]) -> str:
    """Return a year, or a year and month, "" where nothing tells one."""
    text = run.software_date.lower()
    found = date_in(text) or date_in(run.framework.lower())
    if found:
        return found
    name = f"{run.framework} {run.sharding}".lower()
    since = [date for part, date in DEVICES if part in run.gpu.upper()][:1]
    since += [date for part, date in FRAMEWORKS if part in name]
    if since:
        assumed.append(f"software of {max(since)}")
    return max(since, default="")


def date_in(text: str) -> str:
    """Return the date that lower-case words name: "2024-05", "May 2024", a container's "24.05",
    "torch 2.5"."""
    month = next((i for i, one in enumerate(MONTHS, 1) if re.search(rf"\b{one}", text)), 0)
    year = re.search(r"\b(20[12]\d)(?:[-./](\d\d)(?!\d))?", text)
    if year:
        number = int(year[2] or month)
        return f"{year[1]}-{number:02d}" if 1 <= number <= 12 else year[1]
    container = re.search(r"\b(1[7-9]|2\d)\.(0[1-9]|1[0-2])\b", text)
    if container:
        return f"20{container[1]}-{container[2]}"
    release = re.search(r"torch[ =v]*2\.(\d+)", text)
    return RELEASES[min(int(release[1]), len(RELEASES) - 1)] if release else ""


def _degrees(run: PublishedRun) -> tuple[int, ...]:
    """Return the tensor, pipeline, context and expert degrees."""
    return tuple(one or 1 for one in (run.tp, run.pp, run.cp, run.ep))


def _data(run: PublishedRun, assumed: list[str]) -> int | None:
    """Return the data-parallel degree without what others split; some sources count ``cp`` in it, some
    leave ``ep`` out of it."""
    tensor, stages, context, expert = _degrees(run)
    whole = tensor * stages * context
    if run.dp is None or run.gpus % whole or run.gpus == run.dp * whole:
        return run.dp
    for note, degree, all_of_them in (
        ("dp counts cp", context, run.dp * tensor * stages),
        ("dp leaves ep out", expert, run.dp * whole * expert),
    ):
        if degree > 1 and all_of_them == run.gpus:
            assumed.append(note)
            return run.gpus // whole
    return run.dp


def _with_batch(run: PublishedRun, assumed: list[str]) -> PublishedRun:
    """Return a run whose batch is in samples, from tokens, microbatches or throughput where it is not."""
    if run.global_batch is None:
        return replace(run, global_batch=_batch(run, assumed))
    batch, left = divmod(run.global_batch, run.seq)
    if run.global_batch * run.seq <= MOST_TOKENS or left:
        return run
    assumed.append(f"global batch of {batch} samples")
    micro = run.micro_batch
    if micro and micro % run.seq == 0:
        micro //= run.seq
    return replace(run, global_batch=batch, micro_batch=micro)


def _batch(run: PublishedRun, assumed: list[str]) -> int | None:
    """Return the samples of a step whose batch is blank, None where nothing tells them."""
    tensor, stages, context, _ = _degrees(run)
    each = (run.micro_batch or 0) * (run.dp or run.gpus // (tensor * stages * context))
    if each and run.grad_accum:
        return each * run.grad_accum
    batch = _processed(run, run.iter_s) if run.iter_s is not None else None
    if batch:
        assumed.append(f"global batch of {batch} samples")
    elif each and stages == 1:
        assumed.append("one microbatch")
        batch = each
    return batch


def _processed(run: PublishedRun, seconds: float) -> int | None:
    """Return the samples that a printed throughput makes in a step, None where none is printed."""
    rate = run.samples_per_s
    if rate is None and run.tokens_per_s_per_gpu is not None:
        rate = run.tokens_per_s_per_gpu * run.gpus / run.seq
    return (round(rate * seconds) or None) if rate is not None else None
