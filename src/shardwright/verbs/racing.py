"""Plans run in turns on ranks of their own, as one trial."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.core.plan import Plan
from shardwright.files.planfile import read_plan_file, write_plan
from shardwright.planner.lower import lower
from shardwright.verbs.events import Events, following
from shardwright.verbs.request import Watch

if TYPE_CHECKING:
    from shardwright.runtime.capture import Captured
    from shardwright.runtime.capture.source import ModelSource
    from shardwright.runtime.executor import Executor
    from shardwright.runtime.race import Laps, Rules

# Plans tried besides plain data parallelism, unless --try says otherwise.
TRIED = 4
# The seconds of steps of one trial at most.
ROUND_SECONDS = 40.0
# Many short turns: how fast the machine is changes within seconds.
TURNS, MOST_STEPS = 10, 3
# The seconds that one turn of one plan should take.
TURN_SECONDS = 0.4
LEARNING_RATE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What every rank of a trial is told; ``folder`` holds one plan file for each contestant."""

    model: str
    seq: int | None
    optimizer: str
    folder: str
    plans: tuple[str, ...]
    turns: int
    steps: int
    budget_seconds: float  # of steps
    with_torch: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What is to be tried: a model by name, as it is to be trained, with ``count`` plans; ``is_afresh``:
    what ran before does not count."""

    model: str
    seq: int | None
    optimizer: str
    environment: str
    count: int = TRIED
    is_afresh: bool = False


def run_trial(
    plans: Sequence[Plan],
    entry: Entry,
    watch: Watch,
    *,
    turns: int = TURNS,
    with_torch: bool = False,
) -> tuple[Laps, ...]:
    """Run plans in turns on ranks of their own, and return their laps; ``with_torch`` adds torch's
    DistributedDataParallel as the last, on as many ranks as the first plan is run on.

    Plans on other numbers of devices run one number after another, those on a single one among the
    first. Raises RunError where a rank fails, Stopped where the watch asks to stop.
    """
    counts = _counts(plans)
    found: dict[int, Laps] = {}
    last: tuple[Laps, ...] = ()
    for count in dict.fromkeys(counts):
        places = [place for place, own in enumerate(counts) if own == count]
        is_first = with_torch and count == counts[0]
        mine = [plans[place] for place in places]
        laps = _run_together(mine, entry, watch, turns=turns, with_torch=is_first)
        found |= dict(zip(places, laps, strict=False))
        last = laps[len(places) :] or last
    return (*(found[place] for place in range(len(plans))), *last)


def _counts(plans: Sequence[Plan]) -> list[int]:
    """Return on how many ranks each plan is run: that of a single device among those of the first that has more."""
    counts = [len(plan.strategy.devices) for plan in plans]
    most = next((count for count in counts if count > 1), 1)
    return [most if count == 1 else count for count in counts]


def _run_together(
    plans: Sequence[Plan], entry: Entry, watch: Watch, *, turns: int, with_torch: bool
) -> tuple[Laps, ...]:
    from shardwright.runtime.launch import launch
    from shardwright.runtime.profile import local_backend
    from shardwright.runtime.scratch import scratch
    from shardwright.runtime.stopped import Stops

    slowest = max(plan.objective.step_seconds for plan in plans)
    with scratch() as folder:
        names = tuple(f"{number}.json" for number in range(len(plans)))
        for place, plan in zip(names, plans, strict=True):
            write_plan(folder / place, plan)
        task = Task(
            model=entry.model,
            seq=entry.seq,
            optimizer=entry.optimizer,
            folder=str(folder),
            plans=names,
            turns=turns,
            steps=max(1, min(MOST_STEPS, round(TURN_SECONDS / slowest))),
            budget_seconds=min(ROUND_SECONDS, watch.left),
            with_torch=with_torch,
        )
        with following(folder, watch):
            ranks = max(len(plan.strategy.devices) for plan in plans)
            (laps, *_) = launch(
                trial_rank,
                ranks,
                (task,),
                backend=local_backend(),
                stops=Stops(watch.stop, heed=False),
            )
    return laps


def trial_rank(task: Task) -> tuple[Laps, ...]:
    """Run all contestants as one rank: the body of every process."""
    from shardwright.runtime.race import Rules

    folder = Path(task.folder)
    plans = [read_plan_file(folder / name).frontier.best for name in task.plans]
    rules = Rules(turns=task.turns, steps=task.steps, budget_seconds=task.budget_seconds)
    with Events(folder) as events:

        def tell(turn: int) -> None:
            events.tell({"step": turn, "of": task.turns})

        return race_plans(prepare(task, plans[0]), plans, task, rules, tell=tell)


@dataclass(frozen=True, slots=True)
class Ground:
    """A model as it is to be raced: where it comes from, and captured."""

    source: ModelSource
    captured: Captured


def prepare(task: Task, plan: Plan) -> Ground:
    """Capture a model as a plan, and all that are raced with it, train it."""
    from shardwright.runtime.capture import load_model
    from shardwright.runtime.train import build_sharded
    from shardwright.verbs.subject import capture

    source = load_model(task.model)
    captured = capture(
        build_sharded(source).module,
        source.sample(plan.global_batch, task.seq),
        global_batch=plan.global_batch,
        precision=plan.strategy.precision,
        batch_norm=plan.strategy.batch_norm,
        outputs=plan.outputs,
    )
    return Ground(source, captured)


def race_plans(
    ground: Ground,
    plans: Sequence[Plan],
    task: Task,
    rules: Rules,
    *,
    tell: Callable[[int], None] = lambda turn: None,
) -> tuple[Laps, ...]:
    """Build the executor of every plan on this rank, in the world that is joined, and race them. While a plan on a
    single device has its turn the other ranks stand by."""
    from shardwright.runtime import agreement
    from shardwright.runtime.executor import Executor, RunOptions
    from shardwright.runtime.place import choose, stand_on
    from shardwright.runtime.race import PlainData, race
    from shardwright.runtime.train import build_seeded, build_sharded, named_optimizer
    from shardwright.runtime.world import TorchWorld

    source, captured = ground.source, ground.captured
    optimizer = named_optimizer(task.optimizer, LEARNING_RATE)
    device = choose()
    stand_on(device)
    executors: list[Executor] = []
    steps: list[Callable[..., object]] = []
    for plan in plans:
        is_alone = len(plan.strategy.devices) == 1
        if is_alone and agreement.rank() > 0:
            steps.append(_stands_by)
            continue
        executor = Executor(
            captured,
            lower(captured.graph, plan.strategy),
            build_sharded(source).module,
            optimizer=optimizer,
            options=RunOptions(
                device=device, releases=True, lower=lower, world=TorchWorld(alone=is_alone)
            ),
        )
        executors.append(executor)
        steps.append(executor.step)
    if task.with_torch:
        max_norm = plans[0].strategy.max_norm
        steps.append(PlainData(build_seeded(source), optimizer, max_norm).step)
    batches = source.first(plans[0].global_batch, task.seq, MOST_STEPS)
    is_first = agreement.rank() == 0
    try:
        return race(steps, batches, rules, tell if is_first else lambda turn: None)
    finally:
        for executor in executors:
            executor.close()


def _stands_by(batch: object) -> float:
    """The step of a rank that has no part in a plan."""
    del batch
    return 0.0
