"""Prepare a capture: a fake copy of the module, the batch at its global size, and the conditions
under which export sees what an eager run would do."""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import logging
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributions import Distribution
from torch.nn.modules import transformer

from shardwright.errors import CaptureError
from shardwright.runtime.capture.adaptive import traceable_adaptive
from shardwright.runtime.capture.bins import traceable_bins
from shardwright.runtime.capture.copying import copy_module
from shardwright.runtime.capture.covariance import traceable_covariance
from shardwright.runtime.capture.ctc import traceable_ctc
from shardwright.runtime.capture.flexible import traceable_flex
from shardwright.runtime.capture.keeping import untouched_numbers
from shardwright.runtime.capture.known import says_sizes
from shardwright.runtime.capture.packed import traceable_packing
from shardwright.runtime.capture.places import first_line, held_at
from shardwright.runtime.capture.skipping import Skips, chosen
from shardwright.runtime.capture.sound import traceable_istft
from shardwright.runtime.capture.ungrouped import without_group
from shardwright.runtime.scratch import drop_compiler_folder


class LossOnly(nn.Module):
    """Wraps a module so that only its loss, and named outputs behind it, leave; adds the constant
    arguments.

    Its own arguments are ``batch_0, batch_1, ...``, by the order of ``names``: export writes the
    names of a graph's inputs anew where they have capitals or are not plain words.
    """

    def __init__(
        self,
        module: nn.Module,
        names: Iterable[str],
        constants: dict[str, Any],
        outputs: tuple[str, ...] = (),
    ) -> None:
        super().__init__()
        self.module = module
        self.names = {f"batch_{index}": name for index, name in enumerate(names)}
        self.constants = constants
        self.outputs = outputs
        self.skips: Skips | None = (
            None  # what is left out at random only behind all that is computed
        )

    def forward(self, **batch: Tensor) -> Tensor | tuple[Tensor, ...]:
        named = {self.names[key]: tensor for key, tensor in batch.items()}
        with chosen(self.skips, self, batch):
            result = self.module(**named, **self.constants)
            loss = find_loss(result)
            if not self.outputs:
                return loss
            return (loss, *(find_output(result, name) for name in self.outputs))


def find_output(output: Any, name: str) -> Tensor:
    """Return a named output of a forward: a key, an attribute, or a position in a tuple."""
    found: Any = None
    known: list[str] = []
    if isinstance(output, Mapping):
        found, known = output.get(name), [str(key) for key in output]
    elif isinstance(output, (tuple, list)) and not hasattr(output, name):
        known = [str(position) for position in range(len(output))]
        found = output[int(name)] if name in known else None
    else:
        found, known = getattr(output, name, None), list(getattr(output, "_fields", ()))
    if not isinstance(found, Tensor):
        raise CaptureError(
            f"an output must be a tensor that forward returns, but {name[:40]!r} is not among "
            f"{', '.join(known) or type(output).__name__}; return a dict or tuple that holds it"
        )
    return found


def find_loss(output: Any) -> Tensor:
    """Return the loss in what a forward returned, or complain."""
    loss: Any = output
    if isinstance(output, Mapping) and "loss" in output:
        loss = output["loss"]
    elif not isinstance(output, Tensor) and getattr(output, "loss", None) is not None:
        loss = getattr(output, "loss", None)
    elif isinstance(output, (tuple, list)) and output:
        loss = output[0]
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        found: Any = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        if isinstance(loss, Tensor) and not loss.is_floating_point():
            found = f"{found} of {loss.dtype}"
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


def check_kinds(module: nn.Module, batch: Mapping[str, Any] | tuple[Any, ...]) -> None:
    """Refuse what is no module, such as its class, and no batch, such as a tensor alone."""
    if not isinstance(module, nn.Module):
        raise CaptureError(
            f"a model is a torch.nn.Module, not {module!r:.60}; make one of its class, or wrap the function in one"
        )
    if not isinstance(batch, Mapping | tuple | list):
        raise CaptureError(
            f"a batch is a dict of what forward takes by name, or a tuple of it by position, not a "
            f"{type(batch).__name__}; put it into one"
        )


def named_batch(module: nn.Module, batch: Mapping[str, Any] | tuple[Any, ...]) -> dict[str, Any]:
    """Return the arguments of forward by name."""
    try:
        parameters = inspect.signature(module.forward).parameters
    except (TypeError, ValueError) as error:
        raise CaptureError(
            f"forward of {type(module).__name__} has no signature: {error}"
        ) from error
    unnamed = [p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL)]
    if unnamed and not (
        unnamed[0].kind is inspect.Parameter.VAR_POSITIONAL and isinstance(batch, Mapping)
    ):
        raise CaptureError(
            f"forward must take its batch by name, but takes {', '.join(map(str, unnamed))} by "
            f"position; drop the / or the *, or wrap the module"
        )
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


def floating(precision: str | None) -> torch.dtype | None:
    if precision is None:
        return None
    dtype = getattr(torch, precision, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise CaptureError(
            f"precision must name a floating dtype such as bfloat16, not {precision!r}; name one"
        )
    return dtype


def fake_batch(
    mode: FakeTensorMode, named: dict[str, Any], global_batch: int | None, dtype: torch.dtype | None
) -> Batch:
    tensors = {name: value for name, value in named.items() if isinstance(value, Tensor)}
    sizes = [tensor.shape[0] for tensor in tensors.values() if tensor.dim()]
    if not sizes:
        kinds = ", ".join(f"{name} ({type(value).__name__})" for name, value in named.items())
        raise CaptureError(
            f"a batch must hold at least one tensor with a batch dim, but it has {kinds or 'nothing'}"
            "; pass tensors by name (wrap the module where it takes lists or dicts of them)"
        )
    example, size = sizes[0], global_batch or sizes[0]
    if size < 1:
        raise CaptureError(f"the global batch must be at least 1, not {size}")
    fakes: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        check_dense(name, tensor)
        is_batched = tensor.dim() > 0 and tensor.shape[0] == example
        shape = (size, *tensor.shape[1:]) if is_batched else tuple(tensor.shape)
        fakes[name] = fake(mode, tensor, dtype, shape)
        if says_sizes(tensor):
            fakes[name].known = tensor[:1].expand(shape).cpu().clone()  # type: ignore[attr-defined]
    constants = {name: value for name, value in named.items() if name not in tensors}
    return Batch(fakes, constants, size / example)


def fake(
    mode: FakeTensorMode,
    tensor: Tensor,
    dtype: torch.dtype | None,
    shape: tuple[int, ...] | None = None,
) -> Tensor:
    """Return a tensor without storage which claims to be on the CPU."""
    chosen = tensor.dtype if dtype is None else _cast(tensor.dtype, dtype)
    if shape is None:
        meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=chosen, device="meta")
    else:
        meta = torch.empty(shape, dtype=chosen, device="meta")
    # Not asked of the mode, as operators are: a deep model has ten thousand parameters.
    return FakeTensor(mode, meta, torch.device("cpu"))


def fake_copy(mode: FakeTensorMode, module: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Copy a module with fake parameters and buffers; ties stay, nothing is allocated."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        stand_in: Any = fake(mode, parameter, dtype).requires_grad_(parameter.requires_grad)
        # As nn.Parameter marks tensors of other classes, of which it makes a view.
        stand_in._is_param = True
        memo[id(parameter)] = stand_in
    for buffer in module.buffers():
        memo[id(buffer)] = fake(mode, buffer, dtype)
    for child in module.modules():
        for value in vars(child).values():
            if not isinstance(value, Tensor) or id(value) in memo:
                continue
            if value.device.type != "cpu" or not value.is_leaf:
                memo[id(value)] = fake(mode, value, None if value.is_leaf else dtype)
    try:
        return copy_module(module, memo)
    except Exception as error:
        name = _not_copied(module, memo) or type(module).__name__
        raise CaptureError(
            f"a module must be copyable to be captured, but copying {name} failed: "
            f"{first_line(error)}; remove locks, files and generators from its attributes",
            place=held_at(module, name),
        ) from error


def _not_copied(module: nn.Module, memo: dict[int, Any]) -> str:
    """Return the path of an attribute that cannot be copied, "" where each can be by itself."""
    for path, child in module.named_modules():
        for name, value in vars(child).items():
            if name in ("_parameters", "_buffers", "_modules"):
                continue
            try:
                copy.deepcopy(value, dict(memo))
            except Exception:  # noqa: BLE001 - whatever is wrong with it, it is this one
                return f"{path}.{name}".lstrip(".")
    return ""


def tied_names(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """Map every name of a parameter or buffer to all names of that tensor, the first one leading."""
    groups: dict[int, list[str]] = {}
    for name, tensor in (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ):
        groups.setdefault(id(tensor), []).append(name)
    return {name: tuple(names) for names in groups.values() for name in names}


def in_precision(module: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Convert a module's floating numbers, complex ones to those of such parts: ``Module.to`` would drop
    their imaginary parts."""
    if dtype is None:
        return module
    return module._apply(lambda tensor: tensor.to(_cast(tensor.dtype, dtype)))


def _cast(old: torch.dtype, wanted: torch.dtype) -> torch.dtype:
    if old.is_complex:
        return wanted.to_complex() if wanted.itemsize >= 4 else old  # there is none of bfloat16
    return wanted if old.is_floating_point else old


def real_twin(module: nn.Module, *, shares_parameters: bool = False) -> nn.Module:
    """Copy a module with its values. What it has computed of its parameters and keeps in an attribute
    (``torch.nn.utils.weight_norm``), which PyTorch does not copy, every forward makes again."""
    shared = {id(one): one for one in module.parameters()} if shares_parameters else {}
    made = [value for child in module.modules() for value in vars(child).values()]
    results = [one for one in made if isinstance(one, Tensor) and not one.is_leaf]
    return copy_module(module, {id(one): one.detach().clone() for one in results} | shared)


# -- conditions under which export sees what an eager run would do -------------------------------------


@contextlib.contextmanager
def as_eager(batch: Mapping[str, Tensor]) -> Iterator[None]:
    """All of the conditions below that any capture needs."""
    with (
        quiet(), eager_masks(batch), unknown_masks(), traceable_ctc(), traceable_bins(),
        traceable_adaptive(), traceable_covariance(), traceable_packing(), traceable_flex(), traceable_istft(), untouched_numbers(),
        without_group(),
    ):  # fmt: skip
        before = Distribution._validate_args
        Distribution.set_default_validate_args(
            False
        )  # checks of values, which a trace does not know
        try:
            yield
        finally:
            Distribution.set_default_validate_args(before)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep export's and the models' warnings about tracing away from the user.

    A failing operator is logged with its traceback; the CaptureError says what matters of it.
    """
    names = ("torch", "torch._subclasses.fake_tensor", "transformers")
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
            drop_compiler_folder()


@contextlib.contextmanager
def eager_masks(batch: Mapping[str, Tensor]) -> Iterator[None]:
    """Let Hugging Face models leave out masks as they do in an eager run on this batch.

    While exporting they write out a causal mask that an eager run leaves to the attention kernel,
    because the sizes might change later; here they never do. Packed sequences can only come from
    ``position_ids`` in the batch.
    """
    masks = sys.modules.get("transformers.masking_utils")
    changes: dict[str, Any] = {"is_torchdynamo_exporting": lambda: False}
    if "position_ids" not in batch:
        changes["find_packed_sequence_indices"] = lambda *_, **__: None
    if (asks := getattr(masks, "is_tracing", None)) is not None:
        # Some releases (5.17) ask it of a mask that is not there, too, and write out what nothing masks.
        changes["is_tracing"] = lambda mask=None: mask is not None and asks(mask)
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
def unknown_masks() -> Iterator[None]:
    """Let layers of ``nn.Transformer`` use a mask as it is, where its values are not known.

    They look whether it is the causal one, for which a kernel needs no mask; results are the same.
    """
    detect = transformer._detect_is_causal_mask

    def detected(mask: Tensor | None, is_causal: bool | None = None, size: Any = None) -> bool:
        is_traced = isinstance(mask, (FakeTensor, FunctionalTensor))
        return detect(mask, False if is_traced and is_causal is None else is_causal, size)

    transformer._detect_is_causal_mask = detected
    try:
        yield
    finally:
        transformer._detect_is_causal_mask = detect


@contextlib.contextmanager
def eager_paths() -> Iterator[None]:
    """Let Hugging Face models take the path of an eager run where they ask whether they are traced.

    Some leave out a default mask while they are traced and then fail for want of it, others convert
    a layer to the dtype that it has, which traced parameters do not allow.
    """
    name = "is_torchdynamo_compiling"
    asking = [
        module
        for path, module in list(sys.modules.items())
        if path.startswith("transformers.models.") and name in vars(module)
    ]
    before, convert = [getattr(module, name) for module in asking], nn.Module.to

    def to(layer: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        changes = kwargs or any({t.dtype for t in layer.parameters()} - {arg} for arg in args)
        return convert(layer, *args, **kwargs) if changes else layer

    try:
        nn.Module.to = to  # type: ignore[method-assign]
        for module in asking:
            setattr(module, name, lambda: False)
        yield
    finally:
        nn.Module.to = convert  # type: ignore[method-assign]
        for module, value in zip(asking, before, strict=True):
            setattr(module, name, value)


def check_dense(name: str, tensor: Tensor, place: str = "") -> None:
    """Complain of a sparse tensor: shards and messages are dense."""
    if tensor.layout is not torch.strided:
        raise CaptureError(
            f"tensors must be dense, but {name!r} is {str(tensor.layout).removeprefix('torch.')}; keep "
            "its indices and values as two tensors, and add up rows with index_add, or make the sparse "
            "tensor of them in forward",
            place=place,
        )


def check_modules(module: nn.Module) -> None:
    """Complain of modules that cannot be looked into, and of tensors without shapes or strides."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise CaptureError(
                f"parameters must have shapes, but {name!r} takes its own from the first batch; call the "
                "module once on a batch where it is built",
                place=held_at(module, name),
            )
        if tensor.layout is not torch.strided:
            check_dense(name, tensor, held_at(module, name))
    for path, child in module.named_modules():
        if isinstance(child, torch.jit.ScriptModule):
            raise CaptureError(
                f"a model must be made of Python modules, but {path or 'it'} is compiled by "
                f"TorchScript ({child.original_name}); use the module from before torch.jit.script "
                "or torch.jit.trace",
                place=held_at(module, path),
            )
