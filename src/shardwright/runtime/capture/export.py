"""Capture a module with its loss as an operator graph that can also be executed.

The module is never touched: a copy with fake parameters (shapes without storage) goes
through ``torch.export`` into its training IR at the global batch size, so an 8B model built on the
meta device and a live one are captured alike. Where export fails, ``hooks`` makes the offending
modules opaque.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._export.utils import _compiling_state_context as exporting
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwright.errors import CaptureError
from shardwright.runtime.capture.adaptive import adaptive_notes
from shardwright.runtime.capture.assemble import Captured, Results, assemble, live_records
from shardwright.runtime.capture.checks import unchecked_values
from shardwright.runtime.capture.entries import PREFIX, Entries
from shardwright.runtime.capture.folding import Folded, fold
from shardwright.runtime.capture.frugal import uncollected
from shardwright.runtime.capture.functions import custom_gradients
from shardwright.runtime.capture.fused import take_apart
from shardwright.runtime.capture.gradients import check_hooks
from shardwright.runtime.capture.halves import check_halves
from shardwright.runtime.capture.job import Job
from shardwright.runtime.capture.keeping import changes_in, python_numbers
from shardwright.runtime.capture.known import known_sizes
from shardwright.runtime.capture.layers import Layers, shortened
from shardwright.runtime.capture.memos import clean_memos
from shardwright.runtime.capture.places import first_line, with_line
from shardwright.runtime.capture.prepare import (
    as_eager,
    check_kinds,
    check_modules,
    eager_paths,
    fake_batch,
    fake_copy,
    find_loss,
    floating,
    named_batch,
    tied_names,
)
from shardwright.runtime.capture.record import Recorder, Value, aten
from shardwright.runtime.capture.repeated import repeat_layers
from shardwright.runtime.capture.replacing import call_whole, opaque_modules
from shardwright.runtime.capture.rows import keep_dims
from shardwright.runtime.capture.skipping import Skips, find_skips
from shardwright.runtime.capture.slots import take_slots
from shardwright.runtime.capture.spellings import UNCHECKED
from shardwright.runtime.capture.streams import equal_layers
from shardwright.runtime.capture.switching import exported
from shardwright.runtime.capture.terms import shared_out
from shardwright.runtime.capture.translate import Translator
from shardwright.runtime.capture.unsorted import unsorted
from shardwright.runtime.capture.variables import Variable
from shardwright.runtime.capture.written import keep_read


def capture(
    module: nn.Module,
    batch: Mapping[str, Any] | tuple[Any, ...],
    *,
    global_batch: int | None = None,
    precision: str | None = None,
    batch_norm: Literal["local", "synchronised"] = "local",
    name: str = "",
    outputs: tuple[str, ...] = (),
) -> Captured:
    """Capture a module, whose forward on ``batch`` returns a loss, in training mode.

    Submodules that are in evaluation mode while the module itself is not stay so (a frozen norm).

    A mapping is passed to forward by name, a tuple by position. ``global_batch`` replaces dim 0 of
    every batch tensor that has the example's batch size there. ``precision`` (a floating dtype's
    name) converts floating parameters, buffers and inputs. ``batch_norm`` says over whose batch
    training statistics are taken. ``outputs`` are tensors of what forward returns (dict keys,
    attributes, positions in a tuple) to be reported besides the loss. Raises CaptureError; the module itself is not changed.
    """
    dtype, mode = floating(precision), FakeTensorMode(allow_non_fake_inputs=True)
    check_kinds(module, batch)
    with with_line(module), clean_memos(module):
        named = named_batch(module, batch)
        check_modules(module)
        check_hooks(module)
        prepared = fake_batch(mode, named, global_batch, dtype)
        job = Job(
            module=module,
            named=named,
            batch=prepared,
            outputs=tuple(dict.fromkeys(outputs)),
            name=name or type(module).__name__,
            synchronised=batch_norm == "synchronised",
            dtype=dtype,
            copied=lambda: fake_copy(mode, module, dtype),
        )
        captured = _captured(job)
        check_halves(captured.graph, dtype)
        return captured


def _captured(job: Job) -> Captured:
    """Export; where that fails, as an eager run would do it; where that fails too, with opaque parts."""
    with as_eager(job.batch.tensors):
        reason = ""
        for paths in (contextlib.nullcontext, eager_paths):
            with paths():
                try:
                    return _export_deciding(job)
                except CaptureError:
                    raise
                except _Frozen:
                    return _fall_back(job, "")
                except Exception as error:  # noqa: BLE001 - whatever export cannot do, module-level capture may
                    reason = reason or first_line(error)  # what was wrong at first is to be heard
                if job.says_sizes or paths is eager_paths:
                    with contextlib.suppress(_Unknown):
                        return _export_knowing(job)
        with eager_paths():
            return _fall_back(job, reason)


def _export_deciding(job: Job) -> Captured:
    """Export; where that fails, as a model that computes all that it skips at random."""
    try:
        return _export_watched(job)
    except CaptureError:
        raise
    except Exception:
        job.renew()
        skips = _find_skips(job)
        if skips is None:
            raise
    captured = _export_watched(replace(job, skips=skips))
    notes = tuple(filter(None, (*captured.graph.notes, skips.note)))
    return replace(captured, graph=replace(captured.graph, notes=notes))


def _export_knowing(job: Job) -> Captured:
    """Export with the values of what says sizes, and of constants; raises _Unknown where that does not help."""
    job.renew()
    try:
        return _export_checked(replace(job, knows=True))
    except CaptureError:
        raise
    except Exception as error:
        raise _Unknown from error


@custom_gradients()
@uncollected()
def _find_skips(job: Job) -> Skips | None:
    """Return what the model leaves out at random."""

    def run() -> Any:
        with clean_memos(job.module), exporting(), unchecked_values(), job.mode:
            return job.wrapper(**job.arguments)

    return find_skips(job.wrapper, job.arguments, run)


class _Unknown(Exception):
    """Sizes that are known are not all that export would need."""


class _Frozen(Exception):
    """A graph was made, but it holds what Python decided while it was traced."""


def _export_watched(job: Job) -> Captured:
    """Export; of many equal layers only a few, where these are sure to stand for all."""
    job.renew()
    layers = _equal_layers(job)
    if layers:
        try:
            return _export_checked(job, layers)
        except Exception:  # noqa: BLE001 - whatever is wrong with a part, the whole is asked
            job.renew()
    return _export_checked(job)


def _export_checked(job: Job, layers: Sequence[Layers] = ()) -> Captured:
    """Export, and refuse a graph of a module that changes what it holds, or draws, in Python."""
    numbers = python_numbers()
    with changes_in(job.twin) as changed:
        captured = _export(job, layers=layers)
    if numbers == python_numbers() and not changed:
        return captured
    try:
        if job.is_harmless() or (job.seen is not None and not job.seen.whole):
            return captured
    except CaptureError as error:
        if numbers != python_numbers():
            raise
        names = ", ".join(sorted({f"{path}.{name}".lstrip(".") for path, name in changed})[:3])
        note = f"forward changes {names}, and whether that matters to later steps is not known"
        graph = replace(captured.graph, notes=(*captured.graph.notes, f"{note} ({error})"))
        return replace(captured, graph=graph)
    raise _Frozen


@custom_gradients()
@uncollected()
def _equal_layers(job: Job) -> tuple[Layers, ...]:
    """Return the layers of a model that need not all be exported; none where Python may decide otherwise next time."""
    numbers, arguments = python_numbers(), job.arguments

    def run(given: Mapping[str, Tensor]) -> Any:
        with clean_memos(job.module), exporting(), unchecked_values():
            return job.wrapper(**given)

    with changes_in(job.twin) as changed:
        layers = equal_layers(job.wrapper, run, arguments)
    if changed or numbers != python_numbers():
        job.renew()
        return ()
    return layers


@custom_gradients()
@uncollected()
def _export(job: Job, notes: tuple[str, ...] = (), layers: Sequence[Layers] = ()) -> Captured:
    """Export the wrapped copy and translate its graph; ``layers``: those of which a few stand for all."""
    with shortened(job.wrapper, layers), unchecked_values() as checks:
        program, folded = _program(job)
    recorder = Recorder()
    translator = Translator(recorder, synchronised=job.synchronised, prefix=PREFIX)
    if checks:
        translator.notes[UNCHECKED] = None
    entries = Entries(job.wrapper, job.module, job.batch.tensors, recorder)
    owned = {name: entries.owned(name).value for name in entries.owners} if layers else {}
    specs = program.graph_signature.input_specs  # one for each placeholder
    variables = [entries.variable(spec, program) for spec in specs]
    variables += [entries.constant(name, value) for name, value in folded.constants]
    translator.notes |= dict.fromkeys(folded.notes)
    output, *others = translator.walk(program.graph_module, variables)
    if not isinstance(output, Variable):
        raise CaptureError("the loss does not depend on the batch; check the model's forward")
    if layers:
        repeat_layers(recorder, layers, owned, program.graph)
    loss = _check_loss(translator.variables.read(output), recorder)
    given = [entries.input(name).value for name in job.wrapper.names.values()]
    loss = shared_out(recorder, loss, given)
    outputs = {
        name: _computed(other, translator, recorder)
        for name, other in zip(job.wrapper.outputs, others, strict=True)
    }
    needed = (loss, *outputs.values())
    rows = unsorted(keep_read(recorder.records), needed)
    live = live_records(keep_dims(rows, needed), needed)
    ordered = entries.ordered({*translator.variables.written, *job.written})
    records, entered = take_apart(take_slots(live, ordered, needed), ordered, needed)
    captured = assemble(
        name=job.name,
        module=job.module,
        records=records,
        entries=entered,
        results=Results(loss, outputs),
        notes=(*notes, *translator.notes, *recorder.notes, *adaptive_notes(job.module)),
        batch_names=tuple(job.batch.tensors),
    )
    return replace(captured, fixed=folded.rows, filled=folded.filled)


def _program(job: Job) -> tuple[Any, Folded]:
    """Return the wrapped copy's exported program; where sizes are known, they are constants of it."""
    if not job.knows:
        return exported(job.wrapper, (), job.arguments), Folded()
    with known_sizes():
        program = exported(job.wrapper, (), job.arguments)
    names = dict(zip(job.arguments, job.batch.tensors, strict=True))
    return program, fold(program, names, job.batch.tensors, job.named)


def _computed(output: Any, translator: Translator, recorder: Recorder) -> Value:
    """Return an output as something that is computed: what enters the graph is copied."""
    if not isinstance(output, Variable):
        raise CaptureError("an output does not depend on the batch; report it outside of the model")
    value = translator.variables.read(output)
    return value if value.producer >= 0 else recorder.emit(aten.clone.default, value)


def _check_loss(loss: Value, recorder: Recorder) -> Value:
    if loss.producer < 0 or not loss.meta.requires_grad:
        raise CaptureError(
            "a loss must depend on a trainable parameter, but no gradient reaches this one; "
            "check requires_grad and torch.no_grad in the model"
        )
    return recorder.emit(aten.reshape.default, loss, [])


# -- fall-back ----------------------------------------------------------------------------------------


def _fall_back(job: Job, reason: str) -> Captured:
    """Capture with opaque modules where export fails or freezes, or the whole model as one."""
    notes = (f"export failed ({reason})",) if reason else ()
    job.renew()
    if job.seen is not None:
        for _ in opaque_modules(job.twin, job.seen, _attempt):
            try:
                with changes_in(job.twin):
                    return _export(job, notes)
            except CaptureError:
                raise
            except Exception:  # noqa: BLE001 - the next round makes larger modules opaque
                continue
    job.renew()
    return _capture_whole(job, notes)


@custom_gradients()
@uncollected()
def _attempt(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Export and translate a submodule by itself; raises where that cannot be done."""
    with unchecked_values():
        program = exported(module, args, kwargs)
    recorder = Recorder()
    translator = Translator(recorder, synchronised=False, prefix="")
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    values = [node.meta.get("val") for node in placeholders]
    entries = [Variable(recorder.enter(v)) if isinstance(v, Tensor) else v for v in values]
    translator.walk(program.graph_module, entries)


def _capture_whole(job: Job, notes: tuple[str, ...]) -> Captured:
    """Capture the model as one opaque operator of the batch, its parameters and its buffers."""
    seen = job.seen
    if job.outputs:
        why = (*notes, *({} if seen is None else seen.whole).values())
        raise CaptureError(
            f"outputs besides the loss need a model that can be captured in parts, but "
            f"{'; '.join(why)}; remove what stops export, or ask for no outputs"
        )
    recorder = Recorder()
    entries = Entries(job.wrapper, job.module, job.batch.tensors, recorder)
    names = list(dict.fromkeys(group[0] for group in tied_names(job.twin).values()))
    batch_names = tuple(job.batch.tensors)
    if seen is None:
        dtype = next(parameter.dtype for parameter in job.twin.parameters())
        work, rows = job.work_without_values, job.rows
    else:
        dtype = find_loss(seen.output).dtype
        work, rows = seen.sites[""].work[0], seen.sites[""].rows
    state = [PREFIX + name for name in names]
    call = call_whole(job.wrapper, state, job.named, seen, work, rows)
    batch = [entries.input(name) for name in batch_names]
    values = [one.value for one in (*batch, *map(entries.owned, names))]
    meta = torch.empty((), dtype=dtype, device="meta", requires_grad=True)
    loss = recorder.append(call, [values], {}, meta)
    return assemble(
        name=job.name,
        module=job.module,
        records=recorder.records,
        entries=entries.ordered(job.written),
        results=Results(loss),
        notes=(*notes, call.note),
        batch_names=batch_names,
    )
