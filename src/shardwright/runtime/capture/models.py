"""Find a model by its name: ``file.py:factory``, ``package.module:factory`` or ``hf:CONFIG``.

A factory is a function without required arguments that returns ``(module, batch)``, batch being a
mapping by forward's argument names. It may also return only the module; then a function
``<factory>_batch`` beside it, or ``example_batch``, makes the batch. Factory and batch function may
take ``batch_size`` and ``seq`` if they like; without a global batch its default counts. ``training_data(batch_size, seq, start)`` beside it yields
batches to train on, ``held_out_data`` batches to evaluate on. Nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import math
import multiprocessing.util
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from shardwright.errors import InputError, said
from shardwright.runtime.capture.huggingface import hugging_face
from shardwright.runtime.capture.places import defined_at, model_line
from shardwright.runtime.capture.source import USUAL_BATCH, ModelSource, check_numbers
from shardwright.runtime.scratch import claim_multiprocessing


def load_model(spec: str) -> ModelSource:
    """Return the model a name stands for. Raises InputError where there is none."""
    if spec.startswith("hf:"):
        return hugging_face(spec)
    place, separator, attribute = spec.rpartition(":")
    if not separator or not place or not attribute:
        raise InputError(
            f"a model is named file.py:factory, package.module:factory or hf:CONFIG, not {spec!r}; "
            f"for example model.py:build or hf:gpt2"
        )
    source = _import(place, f"model {spec!r}")
    factory = getattr(source, attribute, None)
    if not callable(factory):
        raise InputError(_unknown(f"model {spec!r}", place, source, attribute))
    batches = getattr(source, f"{attribute}_batch", None) or getattr(source, "example_batch", None)
    data = getattr(source, f"{attribute}_data", None) or getattr(source, "training_data", None)
    kept = getattr(source, "held_out_data", None)
    maker = _Maker(spec, factory, batches)
    return ModelSource(
        attribute,
        partial(_build, spec, factory),
        maker.batch,
        None if data is None else partial(_data, spec, data),
        None if kept is None else partial(_data, spec, kept),
        maker.own_size,
        maker.sample,
        maker.made_otherwise,
        defined_at(factory),
    )


# -- python factories --------------------------------------------------------------------------------


def load_object(spec: str, what: str) -> Any:
    """Return what ``file.py:name`` or ``package.module:name`` stands for. Raises InputError, in which it is called
    ``what``, where there is none."""
    place, _, attribute = spec.rpartition(":")
    if not place or not attribute:
        raise InputError(
            f"a {what} is named file.py:name or package.module:name, not {spec!r}; write so"
        )
    source = _import(place, f"{what} {spec!r}")
    if not hasattr(source, attribute):
        raise InputError(_unknown(f"{what} {spec!r}", place, source, attribute))
    if place.endswith(".py"):
        _let_children_import(source)
    return getattr(source, attribute)


def _let_children_import(source: ModuleType) -> None:
    """Let processes that start anew, as a loader's workers may, find a user's file under the name that it has here:
    by a module of that name in the folder that multiprocessing has until this process ends."""
    claim_multiprocessing()
    folder = Path(multiprocessing.util.get_temp_dir())
    fresh = folder / f"{source.__name__}.{os.getpid()}"
    fresh.write_text(_STAND_IN.format(path=source.__file__))
    fresh.rename(folder / f"{source.__name__}.py")
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


_STAND_IN = """
import importlib.util, sys
_found = importlib.util.spec_from_file_location(__name__, {path!r})
sys.modules[__name__] = importlib.util.module_from_spec(_found)
_found.loader.exec_module(sys.modules[__name__])
"""


def _unknown(said: str, place: str, source: ModuleType, attribute: str) -> str:
    known = [name for name, value in vars(source).items() if _is_own(value, source)]
    return f"{said}: {place} has no function {attribute!r}; it defines {', '.join(known) or 'none'}"


def _is_own(value: Any, source: ModuleType) -> bool:
    return callable(value) and getattr(value, "__module__", "") == source.__name__


def _import(place: str, said: str) -> ModuleType:
    """Import a file or a module, turning whatever goes wrong into an InputError.

    A file finds its neighbours, a module those of the working directory, as when Python runs them.
    """
    try:
        if not place.endswith(".py"):
            _look_in(Path.cwd())
            return importlib.import_module(place)
        path = Path(place).resolve()
        if not path.is_file():
            raise InputError(f"{said}: there is no file {place}; check the path")
        # Every rank must find classes under the same name, so the name follows from the path.
        name = f"shardwright_model_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
        if name in sys.modules:
            return sys.modules[name]
        found = importlib.util.spec_from_file_location(name, path)
        if found is None or found.loader is None:
            raise InputError(f"{said}: {place} is not a Python file")
        _look_in(path.parent)
        module = importlib.util.module_from_spec(found)
        sys.modules[name] = module
        try:
            found.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        return module
    except InputError:
        raise
    except (Exception, SystemExit) as error:  # a script that trains, and leaves
        raise InputError(
            f"{said}: importing {place} failed with {_told(error)}; "
            f"fix the file, or name an importable module"
        ) from error


def _look_in(folder: Path) -> None:
    """Let imports look in a folder first, now and whenever the model imports something later."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _call(spec: str, function: Callable[..., Any], options: dict[str, Any]) -> Any:
    """Call a user's function with those options which it takes."""
    try:
        parameters = inspect.signature(function).parameters
        taken = {k: v for k, v in options.items() if k in parameters and v is not None}
        return function(**taken)
    except (Exception, SystemExit) as error:
        name = getattr(function, "__name__", str(function))
        raise InputError(
            f"model {spec!r}: {name}() failed with {_told(error)}; "
            f"a factory must work without arguments"
        ) from error


def _told(error: BaseException) -> str:
    """Return an error with the line of the user's that it comes from."""
    place = f" at {line}" if (line := model_line(error)) else ""
    return f"{type(error).__name__}{place}: {said(error)}"


def _begins(function: Callable[..., Any]) -> str:
    return f" (at {place})" if (place := defined_at(function)) else ""


def _build(spec: str, factory: Callable[..., Any]) -> nn.Module:
    made = _call(spec, factory, {})
    module = made[0] if isinstance(made, tuple) and made else made
    if not isinstance(module, nn.Module):
        raise InputError(
            f"model {spec!r}: a factory must return a torch.nn.Module or (module, batch), "
            f"but this one returned {type(module).__name__}; return the model{_begins(factory)}"
        )
    return module


@dataclass(frozen=True)
class _Maker:
    """What makes a model's batches: a function of the user's, told sizes where it takes them."""

    spec: str
    factory: Callable[..., Any]
    batches: Callable[..., Any] | None

    def made(
        self, batch_size: int | None = None, seq: int | None = None, trained_on: bool = False
    ) -> Mapping[str, Tensor]:
        """Return what the function makes, without drawing a model's weights unless it is to be ``trained_on``.
        Raises InputError where that is too large."""
        given = {"batch_size": batch_size, "seq": seq} if batch_size else {}
        taken = _parameters(self.function).keys() & given.keys()
        sizes = [given[name] or 1 for name in taken]
        check_numbers(math.prod(sizes), f"model {self.spec!r}, asked for {_asked(given, taken)}")
        make = partial(_made, self.spec, self.factory, self.batches, given)
        return make() if trained_on or self.batches else _beside_a_model(make)

    @property
    def function(self) -> Callable[..., Any]:
        """The function that makes batches."""
        return self.batches or self.factory

    def batch(self, batch_size: int, seq: int | None, trained_on: bool = True) -> dict[str, Tensor]:
        """Make a batch of so many rows: by asking for it, else by repeating or dropping rows."""
        takes_size = "batch_size" in _parameters(self.function)
        each = self.rows_each(seq) if takes_size and batch_size > FEW else 1
        made = self.made(max(1, batch_size // each), seq, trained_on)
        return self._brought(made, batch_size, seq, trained_on)

    def _brought(
        self, made: Mapping[str, Tensor], batch_size: int, seq: int | None, trained_on: bool
    ) -> dict[str, Tensor]:
        """Bring what was made for so many rows to as many."""
        have, takes_size = rows_of(made), "batch_size" in _parameters(self.function)
        if takes_size and have > batch_size and have % batch_size == 0:
            each = have // batch_size  # several rows per sample, such as the nodes of a graph
            made = self.made(max(1, batch_size // each), seq, trained_on)
            have = rows_of(made)
        if have not in (0, batch_size):
            self._check_groups(made, batch_size, seq)
            row = sum(t.numel() // have for t in made.values() if t.dim() and t.shape[0] == have)
            check_numbers(batch_size * row, f"model {self.spec!r}, at {batch_size:,} rows")
        return {name: _resized(tensor, have, batch_size) for name, tensor in made.items()}

    def _check_groups(self, made: Mapping[str, Tensor], batch_size: int, seq: int | None) -> None:
        """Refuse to leave out some rows of a sample to which others, such as edges, may refer."""
        each = self.rows_each(seq) if "batch_size" in _parameters(self.function) else 1
        counts = {name: len(tensor) for name, tensor in made.items() if tensor.dim()}
        if batch_size % each and len(set(counts.values())) > 1:
            first = next(iter(counts))
            raise InputError(
                f"model {self.spec!r}: a global batch counts rows of {first!r}, of which its function makes "
                f"{each} a sample, and others of other tensors, so it must be a multiple of {each}, not "
                f"{batch_size}; for {batch_size} samples plan for {batch_size * each} (-b {batch_size * each})"
            )

    def sample(self, batch_size: int, seq: int | None) -> dict[str, Tensor]:
        """Make what a step of so many rows is captured with.

        A few rows stand for all where the function makes as few and every tensor has a row each.
        Edges of a graph say which rows belong together, so these are left as they are made.
        """
        few = max(2, min(batch_size, FEW))
        made = self.made(few, seq)
        have = rows_of(made)
        if have == batch_size:
            return dict(made)
        each = {tensor.shape[0] for tensor in made.values() if tensor.dim()}
        if len(each) > 1:
            return self.batch(batch_size, seq, trained_on=False)
        # Not made again: that may build the whole model.
        return self._brought(made, few, seq, trained_on=False)

    def rows_each(self, seq: int | None) -> int:
        """Return how many rows of the first tensor belong to one sample."""
        return max(1, rows_of(self.made(2, seq)) // 2)

    def own_size(self) -> int:
        """Return the rows of a batch where nobody says how many: by the default of ``batch_size``, or
        as many as there are where there is none."""
        parameter = _parameters(self.function).get("batch_size")
        default = parameter.default if parameter is not None else None
        if default is inspect.Parameter.empty:
            return USUAL_BATCH
        if isinstance(default, int) and default > 0:
            return default * self.rows_each(None)
        return rows_of(self.made()) or USUAL_BATCH

    def made_otherwise(self, batch_size: int, seq: int | None) -> int:
        """Return how many rows the function makes where rows are repeated or dropped to have
        ``batch_size``, otherwise 0."""
        have = rows_of(self.made(batch_size, seq))
        return 0 if have == batch_size else have


FEW = 4  # samples of a batch that stand for all while a model is captured


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # such as a callable written in C
        return {}


def _asked(given: Mapping[str, Any], taken: Iterable[str]) -> str:
    return " and ".join(f"{name} {given[name]}" for name in sorted(taken)) or "a batch"


def rows_of(batch: Mapping[str, Tensor]) -> int:
    """Return dim 0 of the first tensor that has one: what counts as the size of a batch."""
    return next((tensor.shape[0] for tensor in batch.values() if tensor.dim()), 0)


def _made(
    spec: str,
    factory: Callable[..., Any],
    batches: Callable[..., Any] | None,
    options: dict[str, Any],
) -> Mapping[str, Tensor]:
    """Call the user's function for a batch and check what it makes."""
    if batches is not None:
        made = _call(spec, batches, options)
    else:
        made = _call(spec, factory, options)
        made = made[1] if isinstance(made, tuple) and len(made) > 1 else None
    if isinstance(made, Mapping):
        others = [f"{k} ({type(v).__name__})" for k, v in made.items() if not isinstance(v, Tensor)]
        if others:
            raise InputError(
                f"model {spec!r}: the example batch must hold tensors only, but it has "
                f"{', '.join(others)}; give the tensors inside by names of their own, and put them "
                f"together in the forward of a wrapper{_begins(batches or factory)}"
            )
    else:
        raise InputError(
            f"model {spec!r}: no example batch; return (module, batch) from the factory, or define "
            f"example_batch(batch_size) beside it, the batch being a dict of tensors by the names of "
            f"forward's arguments{_begins(batches or factory)}"
        )
    return made


def _beside_a_model(make: Callable[[], Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
    """Return the batch that a function makes with its model, whose parameters take no memory and are not drawn; with
    them where it needs their values.

    Then random numbers are others than beside a whole model, of the same distribution.
    """
    hook = register_module_parameter_registration_hook(_without_values)
    try:
        made = make()
    except InputError:
        made = None
    finally:
        hook.remove()
    if made is None or any(tensor.is_meta for tensor in made.values()):
        return make()
    return made


def _without_values(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
    """Return a parameter on the meta device to be registered instead, None where it stays."""
    del module, name
    if type(parameter) is not nn.Parameter:  # what a lazy layer has, and kinds of users' own
        return None
    looks = torch.empty_like(parameter, device="meta")
    return nn.Parameter(looks, requires_grad=parameter.requires_grad)


def _data(
    spec: str, data: Callable[..., Any], batch_size: int, seq: int | None, start: int
) -> Iterator[dict[str, Tensor]]:
    """Call the user's data function: an iterator of batches, beginning at step ``start``."""
    made = _call(spec, data, {"batch_size": batch_size, "seq": seq, "start": start})
    if not isinstance(made, Iterable):
        raise InputError(
            f"model {spec!r}: a function of data must return batches to iterate over, but this one returned "
            f"{type(made).__name__}; let it yield dicts of tensors{_begins(data)}"
        )
    return iter(made)


def _resized(tensor: Tensor, have: int, rows: int) -> Tensor:
    return resize(tensor, rows) if tensor.dim() and tensor.shape[0] == have else tensor


def resize(tensor: Tensor, rows: int) -> Tensor:
    """Repeat or drop samples until there are ``rows``."""
    have = tensor.shape[0]
    if have in (rows, 0):
        return tensor
    return tensor[torch.arange(rows, device=tensor.device) % have]
