"""The Executor: one rank's live objects, running a Program with tensors.

It obeys the Program and decides nothing. Every rank is given the *global* batch and takes its own
shard of every microbatch from it; microbatch k holds the k-th of equal consecutive pieces of the
global batch, and devices split each piece further.
"""

from __future__ import annotations

import atexit
import copy
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shardwright.core.noise import NoiseScale
from shardwright.core.program import Kind, Output, Program
from shardwright.core.timeline import Timeline
from shardwright.errors import InputError, RunError
from shardwright.runtime import checkpoint, gather, inputs, noise, stream, trace, weights
from shardwright.runtime import outputs as results
from shardwright.runtime.allocator import keep_freed_memory
from shardwright.runtime.capture import Captured
from shardwright.runtime.capture.assemble import with_modules_of
from shardwright.runtime.endings import cause
from shardwright.runtime.interpreter import Action, Compiled, Compiler, compile_forward
from shardwright.runtime.loss import LossSum, told_early
from shardwright.runtime.machine import machine_of, resized
from shardwright.runtime.parameters import taken
from shardwright.runtime.reading import Reader
from shardwright.runtime.scaling import Scaling, scaler_of
from shardwright.runtime.status import StatusFile
from shardwright.runtime.stream import TrainingStep
from shardwright.runtime.update import bound_of, check_optimizer, clip, owned_gradients
from shardwright.runtime.world import TorchWorld, World

# Captures and lowers the model for a batch of another size, by the same plan.
Resize = Callable[[Mapping[str, Tensor]], tuple[Captured, Program]]
# Receives named parameters (this rank's master shards), returns an optimizer over them.
OptimizerFactory = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How to run a Program.

    ``device``: torch device of this rank; None: its own of the type that is planned for, as ``build``
    finds out, else the CPU. ``seed`` of dropout.
    ``max_norm``: bound of the global gradient norm, for plans that clip (None: the plan's own).
    ``check_finite`` raises before the update when the loss is NaN or infinite. ``scaling`` of the loss; None: by the usual
    rules where the plan is for float16, else none. ``timeout``: seconds a collective may take.
    ``world``: the ranks, ``torch.distributed`` where it is None. ``releases``: the module is the
    executor's to empty; its trained parameters go to the meta device once shards are cut.
    ``noise_decay``: of the averages of the gradient noise scale (``Executor.noise``); None: it is not measured.
    """

    device: torch.device | str | None = None
    seed: int = 0
    max_norm: float | None = None
    check_finite: bool = False
    scaling: Scaling | None = None
    timeout: float = 60.0
    world: World | None = None
    releases: bool = False
    noise_decay: float | None = None


class Executor:
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
        check_optimizer(self.optimizer, self.machine, scales=self.scaler is not None)
        self.outputs: dict[str, Tensor] = {}
        self.gradient_norm: Tensor | None = None
        self._meter = noise.meter_of(self.options.noise_decay)
        self._wanted: list[Output] = []
        self._skips: bool | None = None
        self._closed, self._resize = False, resize
        self._sizes: dict[int, Executor] = {}  # for batches of other sizes
        self._running = self
        self._compile()
        noise.check(program, self._noise, self._meter)
        self._explain()
        self.world.watch(self._whereabouts)
        atexit.register(_close_at_exit, weakref.ref(self))

    def _compile(self) -> None:
        """Prepare to run the Program."""
        compiler = Compiler(self.machine, self._special, training=True)
        compiled = compiler.compile(self._mine(), self._lasting())
        self._inputs = inputs.compile_inputs(self.captured, self.program, self.machine.sites)
        self.loss = LossSum(self.machine)
        self._noise = noise.watch(self.machine, self._meter)
        self._training = self._noise.watched(told_early(compiled, compiler, self.loss))
        self._draws = compiler.draws
        self._evaluation: Compiled | None = None

    def _mine(self) -> list[int]:
        """Return this rank's instructions, but for the input's: ``train``, or who calls ``step``, sees
        to that."""
        fed = np.isin(self.program.kind, (Kind.FETCH, Kind.COPY))
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
        """Whether some rank was asked to stop before it finished its last step."""
        return self.loss.interrupted

    @property
    def is_asked_to_stop(self) -> bool:
        """The same without waiting for a device: on a GPU it comes true one step later."""
        return self.loss.heard

    @property
    def noise(self) -> NoiseScale | None:
        """The gradient noise scale of all steps so far (``RunOptions.noise_decay``), equal on all ranks."""
        return self._meter.estimate() if self._meter else None

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
        """
        if (other := self._sized(batch)) is not None:
            return self._through(other, lambda: other.step(batch, outputs))
        self._wanted = results.choose(self.program, outputs)
        loss = self._run(self._training, batch, self._walk)
        self.machine.clock.step += 1
        return loss

    def evaluate(self, batch: inputs.Batch, outputs: Sequence[str] = ()) -> Tensor:
        """Return the loss of one global batch, without dropout and with running statistics.

        ``outputs`` are as in ``step``, and so are batches of other sizes.
        """
        if (other := self._sized(batch)) is not None:
            return self._through(other, lambda: other.evaluate(batch, outputs))
        self._wanted = results.choose(self.program, outputs)
        if self._evaluation is None:
            self._evaluation = compile_forward(self.machine, self._special, self._lasting())
        return self._run(self._evaluation, batch, self._walk)

    def _sized(self, batch: inputs.Batch | inputs.Shards) -> Executor | None:
        """Return what runs a batch of another size than planned, made at the first of its size; None
        where this does."""
        if self._resize is None or self._closed or isinstance(batch, inputs.Shards):
            return None
        tensors = inputs.named(batch, self.captured)
        size = inputs.other_size(tensors, self.captured)
        if size is None:
            return None
        if size not in self._sizes:
            other = copy.copy(self)
            other.captured, other.program = self._resize(tensors)
            other.machine = resized(self.machine, other.captured, other.program)
            other._resize, other._running, other._sizes = None, other, {}
            other._compile()
            self._sizes[size] = other
        return self._sizes[size]

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
        self.outputs, self.gradient_norm = other.outputs, other.gradient_norm
        self.loss.follow(other.loss)
        return loss

    def profile_step(self, batch: inputs.Batch) -> Timeline:
        """Take a few training steps on one batch while measuring every instruction and the memory."""
        self._check_processes("measuring")

        def run(walk: Callable[[Compiled], None]) -> None:
            self._run(self._training, batch, walk)
            self.machine.clock.step += 1

        # Where every rank looks at the loss, or at overflow, before the update, they meet there.
        machine, meets = self.machine, self.options.check_finite or self.scaler is not None
        return trace.measure(machine, self.status, self.optimizer, self._training, run, meets)

    def _run(
        self,
        compiled: Compiled,
        batch: inputs.Batch | inputs.Shards,
        walk: Callable[[Compiled], None],
    ) -> Tensor:
        if self._closed:
            raise InputError("this executor was closed; build another to go on")
        self.loss.check_last()
        store, source = self.machine.store, next(iter(self.machine.sites.values())).source
        inputs.fill(store, self._inputs, batch, self.captured, source.device)
        self.status.words[0] = self.machine.clock.step
        try:
            with torch.no_grad():
                self.loss.seed(self.scaler.scale if self.scaler else 1.0)
                walk(compiled)
                self.loss.start()
                if self.scaler and self._skips is not None:
                    self.scaler.advance(self._skips)
                loss = self.loss.finish()
                self._noise.finish()
                self._collect_outputs()
                return loss
        except (KeyboardInterrupt, RunError):
            raise
        except Exception as error:
            raise self._explained(error) from error
        finally:
            self.status.words[1] = 0
            self._skips = None
            self.loss.clear()
            store.clear()

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

    # -- clipping and update -------------------------------------------------------------------

    def _special(self, index: int) -> Action:
        program, store = self.program, self.machine.store
        if program.kind[index] == Kind.CLIP:
            # Every gradient is complete before the first mesh's update: the first CLIP of a rank
            # serves all meshes it is on, so that all ranks meet in one sum.
            if program.group[index] != self.stage:
                return lambda: None
            every = owned_gradients(self.machine)
            return lambda: self._clip(every)
        masters = taken(program, self.machine.parameters, index)
        at = int(program.microbatch[index])
        pairs = [(master.parameter, store.slot(master.gradient, at)) for master in masters]
        last = program.strategy.pipeline.num_microbatches - 1
        # While other microbatches or meshes have to run, the loss is not known.
        knows = at < 0 or (at == last and len(program.meshes) == 1)
        return lambda: self._update(pairs, knows=knows)

    def _before_update(self) -> None:
        self.loss.start()
        self._noise.meet(self.scaler.scale if self.scaler else 1.0)
        if self.options.check_finite:
            self.loss.check(self.steps)
        if self.scaler and self._skips is None:
            # Here every gradient is complete, of all meshes that this rank is on.
            store, slots = self.machine.store, [slot for slot, _ in owned_gradients(self.machine)]
            found = self.scaler.unscale(store.data, store.owned, dict.fromkeys(slots), store.device)
            self._skips = bool(self.world.all_reduce(found).wait() > 0)

    def _clip(self, pairs: Sequence[tuple[int, bool]]) -> None:
        """Look at all gradients: scale them by their norm where that is asked for."""
        self._before_update()
        if self._max_norm is None:
            return
        if self._skips:
            device = self.machine.store.device
            self.gradient_norm = torch.full((), torch.inf, dtype=torch.float64, device=device)
        else:
            self.gradient_norm = clip(self.machine, pairs, self._max_norm)

    def _update(self, pairs: Sequence[tuple[nn.Parameter, int]], *, knows: bool) -> None:
        if knows:
            self._before_update()
        for parameter, slot in pairs:
            gradient = self.machine.store.data[slot]
            parameter.grad = None if gradient is None else gradient.contiguous().view_as(parameter)
        if not self._skips:
            self.optimizer.step()
        for parameter, _ in pairs:
            parameter.grad = None

    # -- out of and into the executor ----------------------------------------------------------

    def full_parameters(self) -> dict[str, Tensor]:
        """Gather every parameter whole, by name, on every rank (a collective call)."""
        return gather.full_parameters(self.machine)

    def to_module(self, module: nn.Module) -> None:
        """Write parameters and buffers into a plain module on every rank (a collective call)."""
        gather.to_module(self.machine, module)

    def save(self, directory: str | Path, extra: Mapping[str, Any] | None = None) -> Path:
        """Write a checkpoint atomically (a collective call); returns its own directory.

        ``extra`` is the script's own state: numbers, text, lists, tuples, dicts and tensors, such
        as a scheduler's ``state_dict()``; that of rank 0 is kept.
        """
        self._check_processes("a checkpoint")
        self.loss.check_last()
        more = self.reader.beside(extra or {})
        return checkpoint.save(self.machine, self.optimizer, Path(directory), more, self.scaler)

    def load(self, directory: str | Path) -> dict[str, Any]:
        """Load a checkpoint of any plan for this model (a collective call); returns ``extra``."""
        self._check_processes("a checkpoint")
        extra = checkpoint.load(self.machine, self.optimizer, Path(directory), self.scaler)
        return self.reader.restore(extra)

    def export(self, path: str | Path) -> Path:
        """Write the weights as one safetensors file (a collective call); returns its path."""
        self._check_processes("an export")
        self.loss.check_last()
        return weights.export(self.machine, path)

    def load_weights(self, path: str | Path) -> None:
        """Start from a safetensors file, or a folder of them (a collective call)."""
        self._check_processes("loading weights")
        weights.load_weights(self.machine, path)

    def _check_processes(self, what: str) -> None:
        if not isinstance(self.world, TorchWorld):
            raise InputError(
                f"{what} needs one process per rank, but all ranks are in this one; use the "
                "launcher, or torchrun"
            )

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
            self.machine.groups.close()


def _close_at_exit(reference: weakref.ref[Executor]) -> None:
    if (executor := reference()) is not None:
        executor.close()
