"""The proof of a plan: train it small, in float64, and lay it beside plain PyTorch.

``verify`` runs in the caller's process, with every rank a thread of it, or starts one process per
rank; ``train_rank`` is then the body of each.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardwright.core.graph import OperatorGraph
from shardwright.core.legality import divisors
from shardwright.core.plan import Plan
from shardwright.core.program import Program
from shardwright.core.strategy import GradientSync, Precision, Strategy
from shardwright.errors import InputError
from shardwright.files.planfile import Origin
from shardwright.operators.splitting.iteration import pieces_by_dim
from shardwright.operators.splitting.samples import Samples, find_samples
from shardwright.planner.lower import lower
from shardwright.verbs.carry import carry_over
from shardwright.verbs.legality import check_plan
from shardwright.verbs.request import Trial, Watch
from shardwright.verbs.results import TensorGap, Verification
from shardwright.verbs.subject import capture

if TYPE_CHECKING:
    from torch import nn

    from shardwright.runtime.capture import Captured
    from shardwright.runtime.capture.source import ModelSource
    from shardwright.runtime.verify import Batches, Tell, Trained

# Precisions to verify in: the second where the model does not run in the first.
PRECISIONS: tuple[Precision, ...] = ("float64", "float32")
COPIES = 5  # of the model per rank: its own, gradients, momentum, the result, and messages


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is trained: all that a rank needs to know."""

    model: str
    seq: int | None
    strategy: Strategy
    global_batch: int
    steps: int
    outputs: tuple[str, ...] = ()

    @property
    def precision(self) -> Precision:
        """In which it is verified."""
        return self.strategy.precision


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A task ready to train: graph in its precision and Program, module, batches, and how many
    dropout rates were set to zero."""

    captured: Captured
    program: Program
    module: nn.Module
    batches: Batches
    num_dropouts: int


def verify(plan: Plan, origin: Origin, trial: Trial, watch: Watch) -> Verification:
    """Train a plan and plain PyTorch side by side; return how far they are apart.

    Raises PlanMismatch where the model is another one, InputError where the plan is not meant to
    train like one process (local batch norm), draws random numbers, or does not fit in memory.
    """
    from shardwright.runtime import verify as runtime
    from shardwright.runtime.launch import launch
    from shardwright.runtime.stopped import Stops

    watch.tell("capturing the model", 0.0)
    original = capture(
        trial.model,
        global_batch=plan.global_batch,
        seq=origin.seq,
        precision=plan.strategy.precision,
        batch_norm=plan.strategy.batch_norm,
        outputs=plan.outputs,
    ).graph
    check_plan(plan, original)
    samples = find_samples(original)
    _check_batch_norm(original, samples, plan.strategy)
    num_ranks = len(plan.strategy.devices)
    _check_memory(original, num_ranks)

    def show(what: str, begin: float) -> runtime.Tell:
        return lambda done: watch.tell(f"{what}: step {done}", begin + 0.4 * done / trial.steps)

    watch.tell("training with plain PyTorch", 0.1)
    tasks = _tasks(plan, origin, trial, samples)
    task, ready, yardstick = _trained_plainly(tasks, original, show("plain", 0.1))
    captured, batches = ready.captured, ready.batches
    watch.tell(f"training as {num_ranks} ranks", 0.5)
    ranks: list[Trained]
    if trial.ranks == "processes":
        ranks = launch(train_rank, num_ranks, (task, batches), stops=Stops(heed=False))
    else:
        tell = show("ranks", 0.5)
        ranks = runtime.train_here(captured, ready.program, ready.module, batches, tell)
    exact = runtime.is_exact(captured)
    usual = runtime.TOLERANCE if exact else runtime.SINGLE_TOLERANCE
    return Verification(
        label=plan.strategy.label,
        rows=tuple(
            TensorGap(name=gap.name, role=gap.role, shape=gap.shape, difference=gap.difference)
            for gap in runtime.gaps(ranks, yardstick, captured)
        ),
        tolerance=usual if trial.tolerance is None else trial.tolerance,
        losses=yardstick.losses,
        num_ranks=num_ranks,
        ranks=trial.ranks,
        global_batch=task.global_batch,
        notes=_notes(plan, task, ready.num_dropouts, exact),
    )


def train_rank(task: Task, batches: Batches) -> Trained:
    """Train as one process: the body of every rank. Batches are those of plain PyTorch, since a model that is built
    without memory draws other ones."""
    from shardwright.runtime.train import build_sharded
    from shardwright.runtime.verify import train_as_rank

    ready = prepare(task, lambda source: build_sharded(source).module)
    return train_as_rank(ready.captured, ready.program, ready.module, batches, tell=lambda _: None)


def prepare(
    task: Task,
    build: Callable[[ModelSource], nn.Module],
    original: OperatorGraph | None = None,
) -> Prepared:
    """Build model and Program of a task, whose strategy may be for another precision's graph.

    ``build`` makes the module, from a source of it in the task's precision. Raises ValueError where the strategy does not fit the model at this batch size.
    """
    from shardwright.runtime.capture import load_model
    from shardwright.runtime.verify import (
        exact_batches,
        exact_source,
        in_single,
        without_dropout,
    )

    source = load_model(task.model)
    module = build(exact_source(source, task.precision))

    def made(size: int, steps: int) -> Batches:
        found = exact_batches(source, size, task.seq, steps)
        return found if task.precision == "float64" else [in_single(batch) for batch in found]

    captured = capture(
        module,
        made(max(2, task.global_batch), 1)[0],
        global_batch=task.global_batch,
        batch_norm=task.strategy.batch_norm,
        outputs=task.outputs,
    )
    strategy = task.strategy
    if original is not None:
        strategy = carry_over(strategy, original, captured.graph)
    strategy = replace(strategy, pipeline=replace(strategy.pipeline, staleness="none"))
    program = lower(captured.graph, strategy)
    captured, num_dropouts = without_dropout(module, captured)
    batches = made(task.global_batch, task.steps)
    return Prepared(
        captured=captured,
        program=program,
        module=module,
        batches=batches,
        num_dropouts=num_dropouts,
    )


def _tasks(plan: Plan, origin: Origin, trial: Trial, samples: Samples) -> list[Task]:
    """Return what may be trained, best first: in float64, at small global batches which the plan's
    splits still divide."""
    needed = _pieces_of_batch(samples, plan.strategy)
    # What travels is rounded as little as everything else.
    exact = replace(
        plan.strategy,
        gradient_sync=GradientSync().carrying(plan.strategy.gradient_sync),
    )
    sizes = [
        size
        for size in divisors(plan.global_batch, plan.global_batch)
        if size >= max(2, needed) and size % needed == 0
    ] or [plan.global_batch]
    return [
        Task(
            model=trial.model,
            seq=origin.seq,
            strategy=replace(exact, precision=precision),
            global_batch=size,
            steps=trial.steps,
            outputs=plan.outputs,
        )
        for precision in PRECISIONS
        for size in sizes
    ]


def _trained_plainly(
    tasks: list[Task], original: OperatorGraph, tell: Tell
) -> tuple[Task, Prepared, Trained]:
    """Return the first task that fits the plan's graph and that plain PyTorch can train."""
    from shardwright.runtime.train import build_seeded
    from shardwright.runtime.verify import train_plainly

    refusals: dict[str, str] = {}
    _check_data(tasks)
    for task in tasks:
        try:
            ready = prepare(task, build_seeded, original)
        except ValueError as error:
            refusals.setdefault(task.precision, str(error))
            continue
        task = replace(task, strategy=ready.program.strategy)
        _check_random(ready)
        try:
            plain = train_plainly(ready.module, ready.batches, clips=task.strategy.clips, tell=tell)
        # A kernel that lacks the precision, or rows that refer to others which a small batch lacks.
        except (RuntimeError, IndexError) as error:
            refusals.setdefault(task.precision, str(error))
            continue
        return task, ready, plain
    why = "; ".join(f"in {precision}: {refusal}" for precision, refusal in refusals.items())
    raise InputError(
        f"a plan is verified in {' or '.join(PRECISIONS)}, where its model must run and have the "
        f"plan's operators, but {why}; plan it with `--precision float32` to verify it, or mend what "
        "stops the model there"
    )


def _check_data(tasks: list[Task]) -> None:
    """Refuse data of the user's that fails at every size, before its model is captured at each of them."""
    from shardwright.runtime.capture import load_model
    from shardwright.runtime.verify import exact_batches

    source = load_model(tasks[0].model)
    refusal: InputError | None = None
    for task in tasks if source.make_batches is not None else ():
        try:
            exact_batches(source, task.global_batch, task.seq, task.steps)
        except InputError as error:
            refusal = error
        else:
            return
    if refusal is not None:
        raise refusal


def _pieces_of_batch(samples: Samples, strategy: Strategy) -> int:
    """Return into how many pieces the batch is cut: by microbatches, and by devices along it."""
    meshes = strategy.meshes
    pieces = [
        pieces_by_dim(config.dims, meshes[config.mesh].sizes).get(sample, 1)
        for config, sample in zip(strategy.configs, samples.operator_dim, strict=True)
    ]
    return strategy.pipeline.num_microbatches * math.lcm(1, *pieces)


def _check_batch_norm(graph: OperatorGraph, samples: Samples, strategy: Strategy) -> None:
    normalised = [
        index
        for index, operator in enumerate(graph.operators)
        if operator.kind.startswith("aten.batch_norm")
    ]
    is_split = any(
        samples.operator_dim[index] in strategy.configs[index].dims
        for index in normalised
        if samples.operator_dim[index]
    )
    if normalised and (is_split or strategy.pipeline.num_microbatches > 1):
        raise InputError(
            "a plan can be verified if it is meant to train like one process, but this one takes "
            "batch norm statistics over each device's samples, as DDP does; plan with "
            "`--batch-norm synchronised` to verify it"
        )


def _check_memory(graph: OperatorGraph, num_ranks: int) -> None:
    from shardwright.report.units import bytes_text
    from shardwright.runtime.profile.machine import memory_bytes

    needed = 8 * COPIES * graph.num_parameters * (num_ranks + 1)
    if needed > memory_bytes():
        raise InputError(
            f"all ranks of a plan are verified on this machine, in float64, but that takes about "
            f"{bytes_text(needed)} of its {bytes_text(memory_bytes())}; verify a plan of a model "
            "of fewer or narrower layers"
        )


def _check_random(ready: Prepared) -> None:
    from shardwright.runtime.verify import draws_inside, random_operators

    random = ", ".join(random_operators(ready.captured)[:5])
    if not random and draws_inside(ready.module, ready.captured, ready.batches[0]):
        random = "some inside opaque modules"
    if random:
        raise InputError(
            "a model is verified without random numbers (dropout is switched off for it), but these "
            f"operators draw some: {random}; take the numbers from the batch, or leave them out of "
            "the model that is verified"
        )


def _notes(plan: Plan, task: Task, dropouts: int, exact: bool) -> tuple[str, ...]:
    notes = [
        f"model and splits are the plan's own, sequence and layers included; {task.steps} steps"
    ]
    size, full = task.global_batch, plan.global_batch
    if size < full:
        notes.append(f"the global batch is {size} instead of {full}: the smallest it divides into")
    asked, used = plan.strategy.precision, task.precision
    notes.append(used + (f" instead of {asked}" if asked != used else "") + "; SGD with momentum")
    if (wire := plan.strategy.gradient_sync.wire) != "parameter":
        notes.append(f"gradients travel in {used} instead of {wire}")
    if dropouts:
        notes.append(f"dropout is off (rates set to 0: {dropouts})")
    if not plan.strategy.pipeline.is_flushed:
        notes.append(
            "the pipeline is flushed after every batch: stages are verified, not what late gradients do"
        )
    if used != PRECISIONS[0]:
        notes.append("the model does not run in float64: rounding is held to a wider tolerance")
    elif not exact:
        notes.append("the model computes in float32 here and there whatever its dtype")
    return tuple(notes)
