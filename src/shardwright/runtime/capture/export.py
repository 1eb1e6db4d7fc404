"""Capture a module with its loss as an operator graph that can also be executed.

The module is never run and never touched: a copy with fake parameters (shapes without storage) goes
through ``torch.export`` into its training IR at the global batch size, so an 8B model built on the
meta device and a live one are captured alike. Where export fails, ``hooks`` makes the offending
modules opaque.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwright.core.graph import DTYPE_BYTES, TensorSpec
from shardwright.errors import CaptureError
from shardwright.runtime.capture.assemble import Captured, Entry, assemble, dtype_name, substitute
from shardwright.runtime.capture.hooks import call_whole, opaque_modules
from shardwright.runtime.capture.record import Recorder, Unsupported, Value, aten
from shardwright.runtime.capture.translate import Translator
from shardwright.runtime.capture.variables import Variable

PREFIX = "module."


class LossOnly(nn.Module):
    """Wraps a module so that only its loss leaves, and adds the constant arguments."""

    def __init__(self, module: nn.Module, constants: dict[str, Any]) -> None:
        super().__init__()
        self.module = module
        self.constants = constants

    def forward(self, **batch: Tensor) -> Tensor:
        return find_loss(self.module(**batch, **self.constants))


def find_loss(output: Any) -> Tensor:
    """Return the loss in what a forward returned, or complain."""
    loss = output
    if isinstance(output, Mapping) and "loss" in output:
        loss = output["loss"]
    elif not isinstance(output, Tensor) and hasattr(output, "loss"):
        loss = output.loss
    elif isinstance(output, (tuple, list)) and output:
        loss = output[0]
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        found = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise CaptureError(
            f"a model must return its loss as a scalar, in .loss, or first in a tuple, but its "
            f"forward returned {found}; compute the loss in forward (pass the labels in the batch) "
            f"or wrap the module"
        )
    return loss.reshape(())


@dataclass(frozen=True)
class Batch:
    """The batch's tensors at the global batch size (fake), and what else forward is given."""

    tensors: dict[str, Tensor]
    constants: dict[str, Any]
    scale: float


def capture(
    module: nn.Module,
    batch: Mapping[str, Any] | tuple[Any, ...],
    *,
    global_batch: int | None = None,
    precision: str | None = None,
    batch_norm: Literal["local", "synchronised"] = "local",
    name: str = "",
) -> Captured:
    """Capture a module, whose forward on ``batch`` returns a loss, in training mode.

    A mapping is passed to forward by name, a tuple by position. ``global_batch`` replaces dim 0 of
    every batch tensor that has the example's batch size there. ``precision`` (a floating dtype's
    name) converts floating parameters, buffers and inputs. ``batch_norm`` says over whose batch
    training statistics are taken. Raises CaptureError; the module itself is not changed.
    """
    named = _named_batch(module, batch)
    dtype = _floating(precision)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake_batch = _fake_batch(mode, named, global_batch, dtype)
    twin = _fake_copy(mode, module, dtype)
    wrapper = LossOnly(twin, fake_batch.constants).train()
    synchronised = batch_norm == "synchronised"
    job = _Job(module, twin, wrapper, fake_batch, name or type(module).__name__, synchronised)
    with _quiet(), _eager_masks(fake_batch.tensors):
        try:
            return _export(job)
        except CaptureError:
            raise
        except Exception as error:  # whatever export cannot do, module-level capture may
            reason = _first_line(error)
        return _fall_back(job, named, reason)


@dataclass(frozen=True)
class _Job:
    """One capture: the user's module, its fake copy, the copy wrapped, the batch."""

    module: nn.Module
    twin: nn.Module
    wrapper: LossOnly
    batch: Batch
    name: str
    synchronised: bool


def _export(job: _Job, notes: tuple[str, ...] = ()) -> Captured:
    """Export the wrapped copy and translate its graph."""
    with _no_custom_gradients():
        program = torch.export.export(job.wrapper, (), dict(job.batch.tensors), strict=False)
    recorder = Recorder()
    translator = Translator(recorder, synchronised=job.synchronised, prefix=PREFIX)
    entries = _Entries(job, recorder)
    signature = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    variables = [entries.variable(signature[node.name], program) for node in placeholders]
    (output,) = translator.walk(program.graph_module, variables)
    if not isinstance(output, Variable):
        raise CaptureError("the loss does not depend on the batch; check the model's forward")
    loss = _check_loss(translator.variables.read(output), recorder)
    return assemble(
        name=job.name,
        module=job.module,
        records=recorder.records,
        entries=entries.ordered(),
        loss=loss,
        notes=(*notes, *translator.notes),
        batch_names=tuple(job.batch.tensors),
    )


def _check_loss(loss: Value, recorder: Recorder) -> Value:
    if loss.producer < 0 or not loss.meta.requires_grad:
        raise CaptureError(
            "a loss must depend on a trainable parameter, but no gradient reaches this one; "
            "check requires_grad and torch.no_grad in the model"
        )
    return recorder.emit(aten.reshape.default, loss, [])


class _Entries:
    """Everything that enters the graph from outside, tied tensors once."""

    def __init__(self, job: _Job, recorder: Recorder) -> None:
        self.job = job
        self.recorder = recorder
        self.entries: dict[str, tuple[Entry, Variable]] = {}
        self.owners = tied_names(job.twin)

    def variable(self, spec: Any, program: Any) -> Any:
        """Return the variable of one placeholder."""
        kind = spec.kind.name
        if kind == "USER_INPUT":
            return self.input(spec.arg.name)
        path = spec.target.removeprefix(PREFIX)
        if kind in ("PARAMETER", "BUFFER"):
            return self.owned(path)
        if kind == "CONSTANT_TENSOR":
            return self._constant(path, program.constants[spec.target])
        raise Unsupported(f"an entry of kind {kind}")

    def input(self, name: str) -> Variable:
        """Return the variable of a batch tensor."""
        return self._enter(name, self.job.batch.tensors[name], "input")

    def owned(self, path: str) -> Variable:
        """Return the variable of a parameter or buffer, by any of its names."""
        aliases = self.owners[path]
        tensor = _attribute(self.job.twin, aliases[0])
        role = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
        return self._enter(aliases[0], tensor, role, aliases[1:])

    def _constant(self, path: str, lifted: Tensor) -> Variable:
        original = _attribute(self.job.module, path)
        tensor = original if isinstance(original, Tensor) else lifted
        variable = self._enter(path, tensor, "constant", constant=tensor.detach())
        return variable

    def _enter(
        self,
        name: str,
        tensor: Tensor,
        role: Any,
        aliases: tuple[str, ...] = (),
        constant: Tensor | None = None,
    ) -> Variable:
        if name not in self.entries:
            value = self.recorder.enter(tensor)
            spec = TensorSpec(
                name=name,
                shape=tuple(tensor.shape),
                dtype=_known_dtype(name, tensor.dtype),
                role=role,
                needs_gradient=role == "parameter" and tensor.requires_grad,
                aliases=aliases,
            )
            variable = Variable(value, is_buffer=role == "buffer")
            self.entries[name] = (Entry(value=value, spec=spec, constant=constant), variable)
        return self.entries[name][1]

    def ordered(self) -> list[Entry]:
        """Return parameters and buffers in the module's order, then the batch, then constants."""
        for name in self.job.batch.tensors:
            self.input(name)
        rank = {"parameter": 0, "buffer": 1, "input": 2, "constant": 3}
        entries = [entry for entry, _ in self.entries.values()]
        return sorted(entries, key=lambda entry: rank[entry.spec.role])


def tied_names(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """Map every name of a parameter or buffer to all names of that tensor, the first one leading."""
    groups: dict[int, list[str]] = {}
    for name, tensor in (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ):
        groups.setdefault(id(tensor), []).append(name)
    return {name: tuple(names) for names in groups.values() for name in names}


def _attribute(module: nn.Module, path: str) -> Any:
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part, None)
    return value


def _known_dtype(name: str, dtype: torch.dtype) -> str:
    text = dtype_name(dtype)
    if text not in DTYPE_BYTES:
        raise CaptureError(f"tensor {name!r} has dtype {text}; use one of {', '.join(DTYPE_BYTES)}")
    return text


# -- preparing the copy ------------------------------------------------------------------------------


def _named_batch(module: nn.Module, batch: Mapping[str, Any] | tuple[Any, ...]) -> dict[str, Any]:
    """Return the arguments of forward by name."""
    try:
        parameters = inspect.signature(module.forward).parameters
    except (TypeError, ValueError) as error:
        raise CaptureError(f"forward of {type(module).__name__} has no signature: {error}") from error
    named = (
        dict(batch) if isinstance(batch, Mapping) else dict(zip(parameters, batch, strict=False))
    )
    is_open = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    missing = [
        p.name
        for p in parameters.values()
        if p.default is inspect.Parameter.empty
        and p.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        and p.name not in named
    ]
    unknown = [key for key in named if key not in parameters and not is_open]
    if missing or unknown or len(named) != len(batch):
        raise CaptureError(
            f"the batch must match the arguments of forward, ({', '.join(parameters)}), but it has "
            f"({', '.join(map(str, named))}); rename, add or remove entries"
        )
    if "use_cache" in parameters and "use_cache" not in named:
        named["use_cache"] = False
    return named


def _floating(precision: str | None) -> torch.dtype | None:
    if precision is None:
        return None
    dtype = getattr(torch, precision, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise CaptureError(f"precision must name a floating dtype such as bfloat16, not {precision!r}")
    return dtype


def _fake_batch(
    mode: FakeTensorMode, named: dict[str, Any], global_batch: int | None, dtype: torch.dtype | None
) -> Batch:
    tensors = {name: value for name, value in named.items() if isinstance(value, Tensor)}
    sizes = [tensor.shape[0] for tensor in tensors.values() if tensor.dim()]
    if not sizes:
        raise CaptureError("a batch must hold at least one tensor with a batch dim; it has none")
    example, size = sizes[0], global_batch or sizes[0]
    if size < 1:
        raise CaptureError(f"the global batch must be at least 1, not {size}")
    fakes: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        is_batched = tensor.dim() > 0 and tensor.shape[0] == example
        shape = (size, *tensor.shape[1:]) if is_batched else tuple(tensor.shape)
        fakes[name] = _fake(mode, tensor, dtype, shape)
    constants = {name: value for name, value in named.items() if name not in tensors}
    return Batch(fakes, constants, size / example)


def _fake(
    mode: FakeTensorMode, tensor: Tensor, dtype: torch.dtype | None, shape: tuple[int, ...] | None = None
) -> Tensor:
    """Return a tensor without storage which claims to be on the CPU."""
    chosen = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    with mode:
        if shape is not None:
            return torch.empty(shape, dtype=chosen, device="cpu")
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=chosen, device="cpu")


def _fake_copy(mode: FakeTensorMode, module: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Copy a module with fake parameters and buffers; ties stay, nothing is allocated."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        fake = _fake(mode, parameter, dtype)
        memo[id(parameter)] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = _fake(mode, buffer, dtype)
    for child in module.modules():
        for value in vars(child).values():
            if isinstance(value, Tensor) and value.device.type != "cpu" and id(value) not in memo:
                memo[id(value)] = _fake(mode, value, None)
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        raise CaptureError(
            f"a module must be copyable to be captured, but copying {type(module).__name__} failed: "
            f"{_first_line(error)}; remove locks, files and generators from its attributes"
        ) from error


# -- conditions under which export sees what an eager run would do -------------------------------------


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep export's and the models' warnings about tracing away from the user."""
    loggers = [logging.getLogger(name) for name in ("torch", "transformers")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


@contextlib.contextmanager
def _eager_masks(batch: Mapping[str, Tensor]) -> Iterator[None]:
    """Let Hugging Face models leave out masks as they do in an eager run on this batch.

    While exporting they write out a causal mask that an eager run leaves to the attention kernel,
    because the sizes might change later; here they never do. Packed sequences can only come from
    ``position_ids`` in the batch.
    """
    masks = sys.modules.get("transformers.masking_utils")
    changes: dict[str, Any] = {"is_torchdynamo_exporting": lambda: False}
    if "position_ids" not in batch:
        changes["find_packed_sequence_indices"] = lambda *_, **__: None
    changes = {name: value for name, value in changes.items() if hasattr(masks, name)}
    before = {name: getattr(masks, name) for name in changes}
    try:
        for name, value in changes.items():
            setattr(masks, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(masks, name, value)


@contextlib.contextmanager
def _no_custom_gradients() -> Iterator[None]:
    """Refuse ``torch.autograd.Function``: export would keep its forward and lose its backward."""

    def refuse(cls: type, *_: Any, **__: Any) -> Any:
        raise Unsupported(f"the custom gradient of {cls.__name__}")

    original = torch.autograd.Function.__dict__["apply"]
    torch.autograd.Function.apply = classmethod(refuse)
    try:
        yield
    finally:
        torch.autograd.Function.apply = original


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__


# -- fall-back ----------------------------------------------------------------------------------------


def _fall_back(job: _Job, named: dict[str, Any], reason: str) -> Captured:
    """Capture with opaque modules where export fails, or the whole model as one."""
    note = f"export failed ({reason})"
    for _ in opaque_modules(job.module, job.twin, job.wrapper, named):
        try:
            return _export(job, (note,))
        except Unsupported:
            continue
        except CaptureError:
            raise
        except Exception:  # the next attempt makes larger modules opaque
            continue
    recorder = Recorder()
    entries = _Entries(job, recorder)
    names = list(dict.fromkeys(group[0] for group in tied_names(job.twin).values()))
    values = [entries.owned(name).value for name in names]
    batch = [entries.input(name).value for name in job.batch.tensors]
    call, loss_dtype = call_whole(job.module, job.wrapper, named, names, tuple(job.batch.tensors))
    meta = torch.empty((), dtype=loss_dtype, device="meta", requires_grad=True)
    loss = recorder.append(call, [[*values, *batch]], {}, meta)
    return assemble(
        name=job.name,
        module=job.module,
        records=recorder.records,
        entries=entries.ordered(),
        loss=loss,
        notes=(note, call.note),
        batch_names=tuple(job.batch.tensors),
    )


# -- running a captured graph ---------------------------------------------------------------------------


def bind_tensors(captured: Captured, module: nn.Module, batch: Mapping[str, Tensor]) -> dict[int, Tensor]:
    """Return the module's, the batch's and the graph's own tensors by tensor index."""
    state = dict(module.named_parameters()) | dict(module.named_buffers())
    bound: dict[int, Tensor] = dict(captured.constants)
    for index, spec in enumerate(captured.graph.tensors):
        if spec.role in ("parameter", "buffer"):
            bound[index] = state[spec.name]
        elif spec.role == "input":
            bound[index] = batch[spec.name]
    return bound


def evaluate(captured: Captured, tensors: Mapping[int, Tensor]) -> Tensor:
    """Run the whole graph on real tensors, one operator after another, and return the loss."""
    values = dict(tensors)
    device = next(iter(values.values())).device
    for operator, call in zip(captured.graph.operators, captured.calls, strict=True):
        inputs = [values[index] for index in operator.inputs]
        kwargs = {name: substitute(value, inputs) for name, value in call.kwargs.items()}
        if "device" in kwargs:
            kwargs["device"] = device
        result = call.target(*substitute(call.args, inputs), **kwargs)
        outputs = [result] if isinstance(result, Tensor) else list(result or ())
        values.update(zip(operator.outputs, outputs, strict=True))
    return values[captured.graph.loss]
