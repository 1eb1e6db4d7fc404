"""Training from the command line: ranks are started here, and watched through files they append to.

``start`` runs in the parent, ``train_rank`` in every rank. A rank is told everything through a
private folder: the plan, the job, and afterwards its results; nothing is left behind. Where torchrun has
started the ranks, each of them is its own parent.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from shardwright.core.plan import WARM_STEPS, Plan
from shardwright.core.staleness import Course, Extrapolation
from shardwright.core.strategy import Strategy
from shardwright.core.timeline import Timeline
from shardwright.errors import InputError
from shardwright.files.planfile import Origin, read_plan_file, write_plan
from shardwright.verbs.compression import notes_of
from shardwright.verbs.events import Events, following, read_events
from shardwright.verbs.execution import build_executor
from shardwright.verbs.request import Job, Watch
from shardwright.verbs.results import ForecastError, TrainingRun
from shardwright.verbs.stalls import blaming

if TYPE_CHECKING:
    from shardwright.core.noise import NoiseScale
    from shardwright.runtime.train import LoopEnd, Step

# Of the averages of the noise scale: some 100 steps.
NOISE_DECAY = 0.99


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What every rank is told. ``folder`` holds the plan and takes the results."""

    job: Job
    seq: int | None
    optimizer: str
    folder: str


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A finished training: what the ranks reported, and the measured timeline if one was asked
    for."""

    run: TrainingRun
    timeline: Timeline | None


def start(plan: Plan, origin: Origin, job: Job, watch: Watch) -> Outcome:
    """Train and return what happened: on the ranks of which this process is one, as torchrun starts them on the
    hosts of a plan, else on ranks of this machine that are started here. Raises RunError when a rank failed,
    KeyboardInterrupt where the watch asked to stop before all ranks were ready to train."""
    _check_clip(plan.strategy, job.clip)
    alone = int(os.environ.get("WORLD_SIZE", "1")) == 1 or "LOCAL_RANK" not in os.environ
    return (_start_ranks if alone else _among_ranks)(plan, origin, job, watch)


def _start_ranks(plan: Plan, origin: Origin, job: Job, watch: Watch) -> Outcome:
    from shardwright.runtime.checkpoint import tidied
    from shardwright.runtime.launch import launch
    from shardwright.runtime.profile import local_backend, num_local_devices
    from shardwright.runtime.stopped import Stopped, Stops

    devices = plan.strategy.devices
    if len(devices) > num_local_devices():
        raise InputError(
            f"the plan needs {len(devices)} devices, but this machine has {num_local_devices()}; "
            "plan for this machine (--cluster local), or start the command on its hosts: torchrun --nnodes ... "
            "-m shardwright run PLAN MODEL"
        )
    watch.tell("starting ranks", 0.0)
    with _told(plan, origin, job) as task, tidied(job.checkpoint_dir):
        folder = Path(task.folder)
        with following(folder, watch):
            try:
                ends = launch(
                    train_rank, len(devices), (task,),
                    backend=local_backend(), stops=Stops(watch.stop, saves=bool(job.checkpoint_dir)),
                )  # fmt: skip
            except Stopped:
                raise KeyboardInterrupt from None
        return _outcome(ends[0], ends, read_events(folder / "events"))


def _among_ranks(plan: Plan, origin: Origin, job: Job, watch: Watch) -> Outcome:
    """Train as one rank, told by itself; all ranks return what rank 0 saw. A scheduler's SIGTERM, as torchrun's
    agent passes on Ctrl-C, asks for a checkpoint where those are kept."""
    from shardwright.runtime.agreement import from_first, gathered
    from shardwright.runtime.checkpoint import tidied
    from shardwright.runtime.launch import meet
    from shardwright.runtime.status import INTERRUPTION

    INTERRUPTION.listen(termination=bool(job.checkpoint_dir))
    root = job.checkpoint_dir if os.environ["RANK"] == "0" else ""
    with _told(plan, origin, job) as task, tidied(root):
        folder = Path(task.folder)
        with following(folder, watch):
            end = train_rank(task)
        events = from_first(lambda: read_events(folder / "events"))
        ends = gathered(replace(end, timeline=None))
        meet("at the end of training")
    return _outcome(end, ends, events)


@contextmanager
def _told(plan: Plan, origin: Origin, job: Job) -> Iterator[Task]:
    """Give what a rank is told, in a folder that is gone afterwards."""
    from shardwright.runtime.scratch import scratch

    with scratch() as folder:
        write_plan(folder / "plan.json", plan)
        yield Task(
            job=job,
            seq=origin.seq,
            optimizer=job.optimizer or origin.optimizer,
            folder=str(folder),
        )


def _check_clip(strategy: Strategy, asked: float | None) -> None:
    """Refuse a norm that the plan cannot clip at, and a plan that clips without one."""
    if asked and not strategy.clips:
        raise InputError(
            f"clipping costs a message, so a plan must have it, but this one does not clip at {asked}; "
            "plan again with --clip, or leave out --clip"
        )
    if strategy.clips and not (strategy.max_norm if asked is None else asked):
        raise InputError(
            f"the plan clips gradients and needs a norm above 0, not {asked or 0}; give --clip, or "
            "plan again without clipping"
        )


def train_rank(task: Task) -> LoopEnd:
    """Train as one rank: the body of every process."""
    from shardwright.runtime.capture import load_model
    from shardwright.runtime.capture.models import load_object
    from shardwright.runtime.executor import RunOptions
    from shardwright.runtime.reading import loader_of
    from shardwright.runtime.train import (
        LoopOptions,
        build_sharded,
        named_optimizer,
        train,
    )

    job, folder = task.job, Path(task.folder)
    source = load_model(job.model)
    plan = read_plan_file(folder / "plan.json").frontier.best
    example = source.sample(plan.global_batch, task.seq)
    built = build_sharded(source)
    executor = build_executor(
        plan,
        built.module,
        optimizer=named_optimizer(task.optimizer, job.learning_rate),
        batch=example,
        options=RunOptions(
            max_norm=job.clip or None,
            check_finite=True,
            releases=True,
            noise_decay=NOISE_DECAY if job.noise_scale else None,
            forecast_every=job.forecast_every,
            extrapolation=Extrapolation(
                course=cast(Course, job.extrapolation), limit=job.extrapolation_limit
            ),
            rate_annealing=job.rate_annealing,
        ),
    )
    batch_size = plan.global_batch
    tokens = _tokens(example, batch_size)
    options = LoopOptions(
        steps=job.steps,
        checkpoint_dir=job.checkpoint_dir,
        checkpoint_every=job.checkpoint_every,
        resume=job.resume,
        held_out=tuple(source.held_out(batch_size, task.seq)) if job.profiles else (),
        profiles=job.profiles,
    )
    with blaming("the loader", f"see that {job.loader} can be called by itself"):
        loader = loader_of(load_object(job.loader, "loader")) if job.loader else None
    with Events(folder) as events:

        def tell(step: Step) -> bool:
            if executor.rank == 0:
                events.tell(_event(step, executor.noise) | {"tokens": tokens})
            return (folder / "stop").exists()

        end = train(
            executor,
            lambda first: source.batches(batch_size, task.seq, first),
            options,
            tell,
            loader,
        )
    said = notes_of(plan.strategy.gradient_sync, task.optimizer)
    return replace(end, notes=(*((built.note,) if built.note else ()), *said))


def _event(step: Step, noise: NoiseScale | None) -> dict[str, float]:
    """Return what is told of a step, by name: numbers that there are."""
    event: dict[str, float] = {
        "step": step.number,
        "loss": step.loss,
        "seconds": step.seconds,
        "input_seconds": step.input_seconds,
    }
    if step.gradient_norm is not None:
        event["gradient_norm"] = step.gradient_norm
    if noise is not None and math.isfinite(noise.scale):
        event["noise_scale"] = noise.scale
    if (forecast := step.forecast) is not None:
        event["forecast_step"] = forecast.number
        event["forecast_predicted"] = forecast.predicted_rmse
        event["forecast_stale"] = forecast.stale_rmse
    return event


def _tokens(example: dict[str, Any], batch_size: int) -> float:
    """Return how many tokens a global batch has; 0 where samples are not made of tokens."""
    first = next(iter(example.values()))
    is_text = first.dim() == 2 and not first.is_floating_point()
    return float(batch_size * first.shape[1]) if is_text else 0.0


def _all(events: list[dict[str, float]], name: str) -> list[float]:
    """Return the numbers of a name."""
    return [event[name] for event in events if name in event]


def _warm(values: Sequence[float]) -> Sequence[float]:
    """Return what was measured after the first steps, of few steps all."""
    return values[WARM_STEPS:] or values or [0.0]


def _waited(end: LoopEnd) -> float:
    """Return how long a rank's steps waited for their batches, the mean of the warm ones."""
    return statistics.fmean(_warm(end.waits))


def _outcome(end: LoopEnd, ends: Sequence[LoopEnd], events: list[dict[str, float]]) -> Outcome:
    """Return what happened from what rank 0 saw, how long each rank waited for input, and which signal came to one."""
    # Who waits for input makes the others wait in the step: the wait of a step is that of who waits longest.
    waits = [_waited(one) for one in ends]
    waited = max(waits)
    typical = statistics.median(_warm(_all(events, "seconds")))
    typical = max(0.0, typical - (waited - waits[0]))
    tokens = events[0]["tokens"] if events else 0.0
    timeline = end.timeline
    run = TrainingRun(
        losses=tuple(_all(events, "loss")),
        gradient_norms=tuple(_all(events, "gradient_norm")),
        first_step=end.first_step,
        step_seconds=typical,
        tokens_per_second=tokens / typical if typical else 0.0,
        peak_bytes=timeline.peak_bytes if timeline else (),
        held_out=end.held_out,
        checkpoint=end.checkpoint,
        is_complete=end.is_complete,
        signal=next((one.signal for one in ends if one.signal), 0),
        input_seconds=waited,
        notes=end.notes,
        noise_scale=next(reversed(_all(events, "noise_scale")), None),
        forecasts=tuple(
            ForecastError(
                step=int(event["forecast_step"]),
                predicted=event["forecast_predicted"],
                stale=event["forecast_stale"],
            )
            for event in events
            if "forecast_step" in event
        ),
    )
    return Outcome(run=run, timeline=timeline)
