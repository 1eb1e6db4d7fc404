"""What ``shardwright.stalls`` is made of: any loader and step, measured where they are."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwright.core.cluster import Cluster
from shardwright.core.stalls import LEAST_BATCHES, Stalls
from shardwright.errors import InputError, ShardwrightError
from shardwright.verbs.neighbours import USUAL, Neighbours
from shardwright.verbs.request import Watch

SECONDS = 60.0
MOST_BATCHES = 10**6
LOADER_SECONDS = 20.0  # where there is no step to measure


def analyse(
    loader: Iterable[Any] | Callable[[], Iterable[Any]],
    step: Callable[[Any], object],
    *,
    data: Iterable[str | Path] = (),
    batches: int | None = None,
    seconds: float = SECONDS,
    watch: Watch | None = None,
) -> Stalls:
    """Measure how long a training step waits for its input, and for what.

    ``loader`` is any iterable of batches that can be iterated again, or a function that makes one; ``step`` is called
    with each batch (it really trains, a few hundred times). ``data`` names files and folders that the loader reads, where they are
    not seen: files opened by Python in this process, or kept open, are. Their pages are put out of memory between
    phases, which takes no rights. All phases take about ``seconds`` together, or so many ``batches`` each.
    With ``torch.distributed`` it is a collective call, and every time is that of the slowest rank. Raises InputError where
    there is nothing to measure.
    """
    from shardwright.runtime.stalls import Analysis, living

    files = _there(data)
    if not seconds > 0:
        raise InputError(f"an analysis takes a positive number of seconds, not {seconds}")
    if batches is not None and not LEAST_BATCHES <= batches <= MOST_BATCHES:
        raise InputError(
            f"a rate needs {LEAST_BATCHES} batches or more in each phase, at most {MOST_BATCHES:,}, not {batches}"
        )
    watch, neighbours, before = watch or Watch(), Neighbours(), living()
    found = Analysis(loader, step, files, watch.tell).run(seconds, batches)
    share = neighbours.share(living() - before)
    if share <= USUAL or found.ranks > 1:  # of several ranks each is the others' neighbour
        return found
    told = (
        f"other programs took {share:.0%} of this machine's processors meanwhile, so that steps and stalls may be "
        "found too long; end what else runs"
    )
    return replace(found, notes=(*found.notes, told))


def _there(data: Iterable[str | Path]) -> list[str]:
    """Return the names of files and folders, all of which are there."""
    names = [str(one) for one in data]
    missing = [repr(one) for one in names if not one or not Path(one).exists()]
    if missing:
        raise InputError(f"there is no file or folder {', '.join(missing)}; check data= (--data)")
    return names


def analyse_script(
    loader: str, step: str, *, page: str = "", watch: Watch | None = None, **options: Any
) -> tuple[Stalls, bool]:
    """Analyse a loader and a step by their names, ``file.py:name``; under torchrun on all ranks together.

    ``page`` is where charts will be written: a folder that is missing is told before minutes are spent.
    Returns whether this is the rank that speaks, too.
    """
    from shardwright.runtime.capture.models import load_object
    from shardwright.runtime.launch import join_world

    if page and not Path(page).absolute().parent.is_dir():
        raise InputError(
            f"there is no folder {Path(page).parent} to write {Path(page).name} in; make it first"
        )
    if page and Path(page).is_dir():
        raise InputError(f"a page is written to a file, but {page} is a folder; name a file in it")
    given, trained = load_object(loader, "loader"), load_object(step, "step")
    if not callable(trained):
        raise InputError(f"step {step!r} is {type(trained).__name__}; name a function of one batch")
    rank, _ = join_world()

    def train(batch: Any) -> object:
        try:
            return trained(batch)
        except (Exception, SystemExit):
            with blaming(f"the step {step}", f"see that it can be called with a batch of {loader}"):
                raise

    with blaming(f"the loader {loader}", "see that it can be iterated by itself"):
        return analyse(given, train, watch=watch, **options), rank == 0


@contextlib.contextmanager
def blaming(what: str, remedy: str) -> Iterator[None]:
    """Tell what code of the user raises as an InputError, with its line."""
    from shardwright.runtime.launch import Terminated
    from shardwright.runtime.loaders import FEWER, LIVES, death, raised

    try:
        yield
    except (ShardwrightError, MemoryError, Terminated):
        raise
    except (Exception, SystemExit) as error:
        if gone := death(error):
            raise InputError(f"{LIVES} {what}'s {gone.rstrip(',')}; use {FEWER}") from error
        kind, words, place = raised(error)
        at = f" (at {place})" if place else ""
        raise InputError(f"{what} raised {kind}: {words}{at}; {remedy}") from error


def with_loader(cluster: Cluster, loader: str, batch: int, watch: Watch) -> Cluster:
    """Return a cluster whose ranks are given samples as fast as this loader gives them here, read as in training.
    ``batch``: samples of a step.

    A rank's rate is that of the loader as it is, its workers' handing over included: the slope between whole batches
    and the part of one that a rank reads where all share it, and what a batch of no samples would take besides. That
    of a host is of its preparation on all of this machine's cores, on which CPU devices compute, too. Of a loader that
    every rank reads whole, there is only the rate of whole batches.
    """
    from shardwright.runtime.capture.models import load_object
    from shardwright.runtime.reading import as_read, is_shared_out, loader_of

    watch.tell("measuring the loader", 0.0)
    with blaming(f"the loader {loader}", "see that it can be iterated by itself"):
        given = loader_of(load_object(loader, "loader"))
        sizes = {batch, -(-batch // cluster.num_devices)} if is_shared_out(given) else {batch}
        found = {
            rows: analyse(
                as_read(given, batch, rows),
                lambda batch: None,
                seconds=LOADER_SECONDS / len(sizes),
                watch=watch,
            )
            for rows in sorted(sizes)
        }
    whole, rates = found[batch], found[batch].rates
    speeds = {one.batch_samples: one.given for one in found.values()}
    cores = max(1, whole.cores)
    host = rates.prepare * cores / min(max(1, whole.workers), cores)
    notes = (
        f"a rank's loader gives {speeds[whole.batch_samples]:.4g} samples/s ({loader}, {whole.workers} workers, measured here: preparing "
        f"{rates.prepare:.4g}/s, fetching {rates.storage:.4g}/s)",
    )
    told = replace(cluster, notes=(*cluster.notes, *notes))
    if not is_shared_out(given):
        return replace(told, input_rate=_finite(speeds[whole.batch_samples]))
    rate, batch_seconds = _line(speeds)
    return replace(
        told,
        rank_input_rate=rate,
        rank_batch_seconds=batch_seconds,
        host_input_rate=_finite(host),
        host_cores=float(cores) if cluster.has_cpus else 0.0,
    )


def _line(speeds: dict[int, float]) -> tuple[float, float]:
    """Return samples per second, and seconds of a batch besides, of rates of batches of one or two sizes."""
    (less, slow), (more, fast) = min(speeds.items()), max(speeds.items())
    each = (more / fast - less / slow) / (more - less) if more > less else 0.0
    besides = more / fast - more * each
    # Never in less time than samples of whole batches take: what is measured too short is no slope.
    return (_finite(1 / each), besides) if each > 0 and besides > 0 else (_finite(fast), 0.0)


def _finite(rate: float) -> float:
    """Return a rate, or that input is never waited for."""
    return rate if math.isfinite(rate) else 0.0


def save_stalls(found: Stalls, path: str | Path) -> str:
    """Write a page of charts; nothing for an empty path. Returns where it is."""
    if not str(path):
        return ""
    from shardwright.report.stalls import page_text

    Path(path).write_text(page_text(found), encoding="utf-8")
    return str(path)
