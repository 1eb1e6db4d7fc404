"""The Executor: one rank's live objects, running a Program with tensors.

It obeys the Program and decides nothing. Every rank is given the *global* batch and takes its own shard of
every microbatch from it: the k-th of equal consecutive pieces, which devices split further.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shardwright.core.compression import at_step
from shardwright.core.noise import NoiseScale
from shardwright.core.program import INPUT_KINDS, Output, Program
from shardwright.core.strategy import GradientSync
from shardwright.core.timeline import Timeline
from shardwright.errors import InputError, RunError
from shardwright.runtime import inputs, noise, stream, trace
from shardwright.runtime import outputs as results
from shardwright.runtime.allocator import keep_freed_memory
from shardwright.runtime.capture import Captured
from shardwright.runtime.capture.assemble import with_modules_of
from shardwright.runtime.endings import cause
from shardwright.runtime.evaluation import compile_forward
from shardwright.runtime.flushless import Flow, Left, require_finite
from shardwright.runtime.forecast import Forecast, Forecasts
from shardwright.runtime.interpreter import Compiled, Compiler
from shardwright.runtime.keeping import Keeping
from shardwright.runtime.loss import LossSum, told_early
from shardwright.runtime.machine import machine_of, resized
from shardwright.runtime.options import RunOptions, check_lowers
from shardwright.runtime.prediction import Oracle
from shardwright.runtime.reading import Reader
from shardwright.runtime.scaling import scaler_of
from shardwright.runtime.status import StatusFile
from shardwright.runtime.stream import TrainingStep
from shardwright.runtime.update import admit_optimizer, bound_of, share_of
from shardwright.runtime.updating import Ends, Updating
from shardwright.runtime.waiting import Action
from shardwright.runtime.world import TorchWorld

# Captures and lowers the model for a batch of another size, by the same plan.
Resize = Callable[[Mapping[str, Tensor]], tuple[Captured, Program]]
# Receives named parameters (this rank's master shards), returns an optimizer over them.
OptimizerFactory = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]


class Executor(Keeping):
    """Runs training steps of a Program on this rank.

    ``optimizer`` makes the optimizer from this rank's named master shards;
    ``functools.partial(torch.optim.AdamW, lr=1e-3)`` will do. Learning-rate schedulers attach to
    ``executor.optimizer``. The process group must be initialised where there are several ranks.
    ``resize`` makes the Program of batches with another number of samples, which are refused
    without it.

    After a step of a plan that clips, ``gradient_norm`` is the global norm before clipping, as
    ``torch.nn.utils.clip_grad_norm_`` returns it: equal on all ranks (0-d, float64), infinite where
    a scaled loss overflowed. It is None for other plans.
    """

    def __init__(
        self,
        captured: Captured,
        program: Program,
        module: nn.Module,
        *,
        optimizer: OptimizerFactory,
        options: RunOptions | None = None,
        resize: Resize | None = None,
    ) -> None:
        keep_freed_memory()
        captured = with_modules_of(captured, module)
        self.captured, self.program, self.options = captured, program, options or RunOptions()
        check_lowers(program, self.options)
        self.world = self.options.world or TorchWorld(self.options.timeout)
        self.rank = self.world.rank
        self.machine = machine_of(
            captured, program, module, self.world, self.options.device, self.options.seed
        )
        if self.options.releases:
            self.machine.parameters.release_module()
        self.optimizer = optimizer(self.machine.parameters.named())
        self.scaler = scaler_of(program, self.options.scaling, len(self.machine.sites))
        self.reader, self.status = Reader(self.options.seed), StatusFile(self.rank)
        self._max_norm = bound_of(program, self.options.max_norm)
        self._oracle = Oracle(self.machine.clock, self.options.extrapolation)
        admit_optimizer(
            self.optimizer, self.machine, self._oracle.how, scales=self.scaler is not None
        )
        self.outputs: dict[str, Tensor] = {}
        self.left: int | None = None
        self._meter = noise.meter_of(self.options.noise_decay)
        self._forecasts = Forecasts(self.machine, self.options.forecast_every)
        self._wanted: list[Output] = []
        self._closed, self._resize = False, resize
        self._sizes: dict[int, Executor] = {}  # for batches of other sizes
        self._warm: dict[GradientSync, Executor] = {}  # for densities of a warm-up
        self._running = self
        self._compile()
        noise.check(program, self._noise, self._meter)
        self._explain()
        self.world.watch(self._whereabouts)
        atexit.register(_close_at_exit, weakref.ref(self))

    def _compile(self) -> None:
        """Prepare to run the Program."""
        self._inputs = inputs.compile_inputs(self.captured, self.program, self.machine.sites)
        self.loss = LossSum(self.machine)
        self._noise = noise.watch(self.machine, self._meter)
        ends = Ends(
            lambda: self.optimizer, self.loss, self._noise, self._forecasts, self._oracle, self.scaler,
            self._max_norm, self.options.check_finite,
            share_of(self.program, self.options.rate_annealing),
        )  # fmt: skip
        self._updating = Updating(self.machine, ends)
        compiler = Compiler(self.machine, self._updating.action, training=True)
        self._training, self._flow = Compiled((), {}), None
        if self.program.strategy.pipeline.is_flushed or len(self.program.meshes) == 1:
            compiled = compiler.compile(self._mine(), self._lasting())
            self._training = self._noise.watched(told_early(compiled, compiler, self.loss))
        else:
            self._flow = Flow(self.machine, compiler, self._mine(), self.loss, self._forecasts)
        self._draws = compiler.draws
        self._evaluation: Compiled | None = None

    def _mine(self) -> list[int]:
        """Return this rank's instructions, but for the input's, which who calls ``step`` sees to."""
        fed = np.isin(self.program.kind, INPUT_KINDS)
        mine = np.isin(self.program.group, list(self.machine.sites)) & ~fed
        return [int(index) for index in np.flatnonzero(mine)]

    def _explain(self) -> None:
        self.status.explain({i: self.program.describe(i) for i in self._mine()}, self.stage)

    @property
    def steps(self) -> int:
        """How many steps have been taken."""
        return self.machine.clock.step

    @property
    def epochs(self) -> int:
        """How many passes of ``train`` over its loader are over."""
        return self.reader.place.epochs if self.reader.place else 0

    @property
    def interrupted(self) -> bool:
        """Whether some rank was asked to stop before it finished its last step; of an asynchronous pipeline
        all hear of it some steps later."""
        return self._flow.interrupted if self._flow else self.loss.interrupted

    @property
    def is_asked_to_stop(self) -> bool:
        """The same without waiting for a device: on a GPU it comes true one step later."""
        return self._flow.interrupted if self._flow else self.loss.heard

    @property
    def gradient_norm(self) -> Tensor | None:
        """The global norm of the last step's gradient, before it was clipped."""
        return self._updating.gradient_norm

    @property
    def noise(self) -> NoiseScale | None:
        """The gradient noise scale of all steps so far (``RunOptions.noise_decay``), equal on all ranks."""
        return self._meter.estimate() if self._meter else None

    @property
    def forecast(self) -> Forecast | None:
        """The last look at predicted weights (``RunOptions.forecast_every``), equal on all ranks."""
        return self._forecasts.last

    @property
    def stage(self) -> int:
        """The first mesh that this rank belongs to."""
        return min(self.machine.sites)

    # -- running -------------------------------------------------------------------------------

    def train(
        self,
        loader: Any,
        outputs: Sequence[str] = (),
        *,
        ahead: int = 1,
        shard: bool | None = None,
        resume: bool = True,
    ) -> Iterator[TrainingStep]:
        """Train on one pass over a loader of global batches, or over a data set; yield each step as it went.

        While a step computes, a thread draws the next batch and copies this rank's shards to its device: ``ahead``
        at most are drawn before their step (0: no thread). All ranks pass equal loaders, and all end after a
        step in which one was interrupted. What the loader raises, the step raises that would have had the batch.
        ``shard``: a rank reads only its samples (None: where collate is torch's); ``resume``: where a checkpoint was.
        """
        copier = stream.Copier(self._inputs, self.captured, self.machine.store.device)
        source = self.reader.open(loader, copier.needed, shard=shard, resume=resume)
        feed = stream.Feed(source, copier, rank=self.rank, ahead=ahead, draws=self._draws)
        return stream.train(self, feed, outputs)

    def step(self, batch: inputs.Batch | inputs.Shards, outputs: Sequence[str] = ()) -> Tensor:
        """Train on one global batch and return its loss, equal on all ranks (0-d, float64).

        The named ``outputs`` of the plan are put together in ``self.outputs``, as forward made them
        before the update; all ranks must ask for the same. A batch may have another number of
        samples than planned, such as the last of a data set: its loss and gradient are those of
        plain PyTorch on it.

        In an asynchronous pipeline of N stages the batch enters, and the loss is that of one which has left, the
        N-th before it, or the second where it has microbatches: number ``self.left``, counted from 1. While the pipeline fills it is NaN, and ``left`` is None.
        Batches have the planned size there, and only ``evaluate`` has outputs.
        """
        if self._flow:
            return self._enter(self._flow, batch, outputs)
        if (other := self._other(batch)) is not None:
            return self._through(other, lambda: other.step(batch, outputs))
        self._wanted = results.choose(self.program, outputs)
        loss = self._run(self._training, batch, self._walk)
        self.machine.clock.step += 1
        self.left = self.steps
        return loss

    def _enter(
        self, flow: Flow, batch: inputs.Batch | inputs.Shards, names: Sequence[str]
    ) -> Tensor:
        if names:
            raise InputError(
                "an asynchronous pipeline has the outputs of several batches under way, but "
                f"{names[0][:40]!r} is asked of a step; ask evaluate for it"
            )
        self._check_open()
        inputs.check_size(batch, self.captured)

        def fill(at: int) -> None:
            inputs.fill(self.machine.store, self._inputs, batch, self.captured, at)

        with self._told(), torch.no_grad():
            left = flow.enter(fill, self._act)
        self.left = left.number if left else None
        if left is None:
            self.optimizer.step()  # without gradients: nothing, but schedulers want to come behind it
            return torch.full((), torch.nan, dtype=torch.float64, device=self.machine.store.device)
        if self.options.check_finite:
            require_finite(left, self.rank)
        return left.loss

    def flush(self) -> list[Left]:
        """Let all batches leave an asynchronous pipeline; return the losses that no step returned yet (a collective
        call). Of other plans nothing is ever under way."""
        self.drain()
        return self._flow.leave() if self._flow else []

    def drain(self) -> None:
        """Let all batches leave; their losses are returned by the steps, or the flush, to come (a collective
        call)."""
        if self._flow and not self._closed:
            with self._told(), torch.no_grad():
                self._flow.drain(self._act)

    def _act(self, index: int, action: Action) -> None:
        words = self.status.words
        words[0], words[1] = self.machine.clock.step, index + 1
        action()

    def evaluate(self, batch: inputs.Batch, outputs: Sequence[str] = ()) -> Tensor:
        """Return the loss of one global batch, without dropout and with running statistics.

        ``outputs`` are as in ``step``, and so are batches of other sizes. An asynchronous pipeline is
        flushed first, as by all that looks at the model.
        """
        self.drain()
        if (other := self._sized(batch)) is not None:
            return self._through(other, lambda: other.evaluate(batch, outputs))
        self._wanted = results.choose(self.program, outputs)
        if self._evaluation is None:
            self._evaluation = compile_forward(
                self.machine, self._updating.evaluation, self._lasting()
            )
        return self._run(self._evaluation, batch, self._walk)

    def _sized(self, batch: inputs.Batch | inputs.Shards) -> Executor | None:
        """Return what runs a batch of another size than planned, made at the first of its size; None
        where this does."""
        if self._resize is None or self._closed or isinstance(batch, inputs.Shards):
            return None
        tensors = inputs.named(batch, self.captured.batch_names)
        size = inputs.other_size(tensors, self.captured)
        if size is None:
            return None
        if size not in self._sizes:
            self._sizes[size] = self._like(*self._resize(tensors))
        return self._sizes[size]

    def _like(self, captured: Captured, program: Program) -> Executor:
        """Return what runs another Program of the same plan and state."""
        other = copy.copy(self)
        other.captured, other.program = captured, program
        other.machine = resized(self.machine, captured, program)
        other._resize, other._running, other._sizes, other._warm = None, other, {}, {}
        other._compile()
        return other

    def _other(self, batch: inputs.Batch | inputs.Shards) -> Executor | None:
        """Return what runs this step's batch; None where this does. While densities warm up, what sends those
        of the step."""
        sized = self._sized(batch)
        base, strategy = sized or self, (sized or self).program.strategy
        sync, lower = at_step(strategy.gradient_sync, self.steps), self.options.lower
        if lower is None or sync == strategy.gradient_sync:
            base._warm = {}
            return sized
        if sync not in base._warm:
            program = lower(base.captured.graph, replace(strategy, gradient_sync=sync))
            base._warm = {sync: base._like(base.captured, program)}
        return base._warm[sync]

    def _through(self, other: Executor, run: Callable[[], Tensor]) -> Tensor:
        """Run one batch by another executor of the same state."""
        self.loss.check_last()
        other.optimizer, self._running = self.optimizer, other
        other._explain()
        try:
            loss = run()
            other.loss.check_last()
        finally:
            self._running = self
            self._explain()
        self.outputs, self.left = other.outputs, other.left
        self._updating.gradient_norm = other.gradient_norm
        self.loss.follow(other.loss)
        return loss

    def profile_step(self, batch: inputs.Batch) -> Timeline:
        """Take a few training steps on one batch while measuring every instruction and the memory."""
        self.check_processes("measuring")
        if self._flow:
            raise InputError(
                "instructions are measured where a step is one batch's, but this plan's pipeline is "
                "asynchronous; measure the plan without staleness, or time the steps"
            )

        def run(walk: Callable[[Compiled], None]) -> None:
            self._run(self._training, batch, walk)
            self.machine.clock.step += 1

        # Where every rank looks at a loss that is summed there, or at overflow, before the update, they meet there.
        meets = self.scaler is not None or (self.options.check_finite and not self.loss.is_early)
        return trace.measure(self.machine, self.status, self.optimizer, self._training, run, meets)

    def _run(
        self,
        compiled: Compiled,
        batch: inputs.Batch | inputs.Shards,
        walk: Callable[[Compiled], None],
    ) -> Tensor:
        self._check_open()
        self.loss.check_last()
        store = self.machine.store
        inputs.fill(store, self._inputs, batch, self.captured)
        self.status.words[0] = self.machine.clock.step
        try:
            with self._told(), torch.no_grad():
                self.loss.seed(self.scaler.scale if self.scaler else 1.0)
                walk(compiled)
                self.loss.start()
                if self.scaler and self._updating.skips is not None:
                    self.scaler.advance(self._updating.skips)
                loss = self.loss.finish()
                self._noise.finish()
                self._collect_outputs()
                return loss
        finally:
            self._updating.skips = None
            self.loss.clear()
            store.clear()

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Say of what goes wrong within where that was."""
        try:
            yield
        except (KeyboardInterrupt, RunError):
            raise
        except Exception as error:
            raise self._explained(error) from error
        finally:
            self.status.words[1] = 0

    def _check_open(self) -> None:
        if self._closed:
            raise InputError("this executor was closed; build another to go on")

    def _walk(self, compiled: Compiled) -> None:
        words = self.status.words
        for index, action in compiled.actions:
            words[1] = index + 1
            action()

    def _explained(self, error: Exception) -> RunError:
        instruction = self._whereabouts()
        text = cause(error, self.rank, f"in step {self.steps}, {instruction}")
        return RunError(text, rank=self.rank, stage=self.stage, instruction=instruction)

    def _whereabouts(self) -> str:
        index = int(self.status.words[1]) - 1
        return self._running.program.describe(index) if index >= 0 else "between instructions"

    # -- loss ----------------------------------------------------------------------------------

    def _lasting(self) -> frozenset[int]:
        """Return the slots of loss and outputs, of all meshes: they last until the end of a step."""
        values = [self.program.loss, *(output.value for output in self.program.outputs)]
        store = self.machine.store
        return frozenset(s for v in values for s in results.slots_of(self.program, store, v))

    def _collect_outputs(self) -> None:
        machine, sites = self.machine, dict(self.machine.sites)
        self.outputs = {
            output.name: results.collect(self.program, machine.store, sites, self.world, output)
            for output in self._wanted
        }
        self._wanted = []

    def close(self) -> None:
        """Destroy the process groups that were made for this Program; done at exit if not before.

        The compiled instructions hold the groups, so they go too. A group that outlives the
        interpreter has threads that do: one that frees a tensor then wants a lock which is gone,
        and ends the process by a signal.
        """
        if not self._closed:
            self._closed = True
            self._training = self._evaluation = Compiled((), {})
            self._sizes.clear()
            if self._flow:
                self._flow.close()
            self.machine.groups.close()


def _close_at_exit(reference: weakref.ref[Executor]) -> None:
    if (executor := reference()) is not None:
        executor.close()
