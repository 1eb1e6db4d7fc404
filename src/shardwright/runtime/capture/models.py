"""Find a model by its name: ``file.py:factory``, ``package.module:factory`` or ``hf:CONFIG``.

A factory is a function without required arguments that returns ``(module, batch)``, batch being a
mapping by forward's argument names. It may also return only the module; then a function
``<factory>_batch`` beside it, or ``example_batch``, makes the batch. Factory and batch function may
take ``batch_size`` and ``seq`` if they like. ``training_data(batch_size, seq, start)`` beside it yields
batches to train on, ``held_out_data`` batches to evaluate on. Nothing is downloaded.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import importlib.util
import inspect
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.errors import InputError
from shardwright.runtime.capture.configs import KNOWN_CONFIGS, TASKS

DEFAULT_SEQ = 128
HELD_OUT_BATCHES = 8


@dataclass(frozen=True)
class ModelSource:
    """A model that can be built and fed.

    ``make_module`` builds it under whatever device is current. ``make_batch`` takes batch size and
    sequence length (None: the model's own choice) and makes an example batch.
    """

    name: str
    make_module: Callable[[], nn.Module]
    make_batch: Callable[[int, int | None], dict[str, Tensor]]
    make_batches: Callable[[int, int | None, int], Iterator[dict[str, Tensor]]] | None = None
    make_held_out: Callable[[int, int | None, int], Iterator[dict[str, Tensor]]] | None = None

    def build(self, device: str = "meta") -> nn.Module:
        """Build the module; on ``meta`` without storage, or on the CPU where it resists that."""
        if device != "meta":
            with torch.device(device):
                return self.make_module()
        try:
            with torch.device("meta"):
                return self.make_module()
        except InputError:
            return self.make_module()

    def example(self, batch_size: int, seq: int | None = None) -> dict[str, Tensor]:
        """Make a batch of ``batch_size`` samples (of ``seq`` tokens, where that applies)."""
        if batch_size < 1 or (seq is not None and seq < 1):
            raise InputError(f"batch size and seq must be at least 1, not {batch_size} and {seq}")
        return self.make_batch(batch_size, seq)

    def batches(
        self, batch_size: int, seq: int | None = None, start: int = 0
    ) -> Iterator[dict[str, Tensor]]:
        """Yield training batches from step ``start`` on; the example for ever where there is no data."""
        if self.make_batches is not None:
            return self.make_batches(batch_size, seq, start)
        return itertools.repeat(self.example(batch_size, seq))

    def held_out(self, batch_size: int, seq: int | None = None) -> list[dict[str, Tensor]]:
        """Return a few batches that training never sees; none where there is no such data."""
        if self.make_held_out is None:
            return []
        return list(itertools.islice(self.make_held_out(batch_size, seq, 0), HELD_OUT_BATCHES))


def load_model(spec: str) -> ModelSource:
    """Return the model a name stands for. Raises InputError where there is none."""
    if spec.startswith("hf:"):
        return _hugging_face(spec)
    place, separator, attribute = spec.rpartition(":")
    if not separator or not place or not attribute:
        raise InputError(
            f"a model is named file.py:factory, package.module:factory or hf:CONFIG, not {spec!r}; "
            f"for example model.py:build or hf:gpt2"
        )
    source = _import(place, spec)
    factory = getattr(source, attribute, None)
    if not callable(factory):
        known = [name for name, value in vars(source).items() if _is_own(value, source)]
        raise InputError(
            f"model {spec!r}: {place} has no function {attribute!r}; it defines "
            f"{', '.join(known) or 'none'}"
        )
    batches = getattr(source, f"{attribute}_batch", None) or getattr(source, "example_batch", None)
    data = getattr(source, f"{attribute}_data", None) or getattr(source, "training_data", None)
    kept = getattr(source, "held_out_data", None)
    return ModelSource(
        attribute,
        partial(_build, spec, factory),
        partial(_batch, spec, factory, batches),
        None if data is None else partial(_data, spec, data),
        None if kept is None else partial(_data, spec, kept),
    )


# -- python factories --------------------------------------------------------------------------------


def _is_own(value: Any, source: ModuleType) -> bool:
    return callable(value) and getattr(value, "__module__", "") == source.__name__


def _import(place: str, spec: str) -> ModuleType:
    """Import a file or a module, turning whatever goes wrong into an InputError."""
    try:
        if not place.endswith(".py"):
            return importlib.import_module(place)
        path = Path(place).resolve()
        if not path.is_file():
            raise InputError(f"model {spec!r}: there is no file {place}; check the path")
        # Every rank must find classes under the same name, so the name follows from the path.
        name = f"shardwright_model_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
        if name in sys.modules:
            return sys.modules[name]
        found = importlib.util.spec_from_file_location(name, path)
        if found is None or found.loader is None:
            raise InputError(f"model {spec!r}: {place} is not a Python file")
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
    except Exception as error:
        raise InputError(
            f"model {spec!r}: importing {place} failed with {type(error).__name__}: {error}; "
            f"fix the file, or name an importable module"
        ) from error


def _call(spec: str, function: Callable[..., Any], options: dict[str, Any]) -> Any:
    """Call a user's function with those options which it takes."""
    try:
        parameters = inspect.signature(function).parameters
        taken = {k: v for k, v in options.items() if k in parameters and v is not None}
        return function(**taken)
    except Exception as error:
        name = getattr(function, "__name__", str(function))
        raise InputError(
            f"model {spec!r}: {name}() failed with {type(error).__name__}: {error}; "
            f"a factory must work without arguments"
        ) from error


def _build(spec: str, factory: Callable[..., Any]) -> nn.Module:
    made = _call(spec, factory, {})
    module = made[0] if isinstance(made, tuple) and made else made
    if not isinstance(module, nn.Module):
        raise InputError(
            f"model {spec!r}: a factory must return a torch.nn.Module or (module, batch), "
            f"but this one returned {type(module).__name__}"
        )
    return module


def _batch(
    spec: str,
    factory: Callable[..., Any],
    batches: Callable[..., Any] | None,
    batch_size: int,
    seq: int | None,
) -> dict[str, Tensor]:
    """Make the batch and bring it to the batch size asked for."""
    options = {"batch_size": batch_size, "seq": seq}
    if batches is not None:
        made = _call(spec, batches, options)
    else:
        made = _call(spec, factory, options)
        made = made[1] if isinstance(made, tuple) and len(made) > 1 else None
    if not isinstance(made, Mapping) or not all(isinstance(v, Tensor) for v in made.values()):
        raise InputError(
            f"model {spec!r}: no example batch; return (module, batch) from the factory, or define "
            f"example_batch(batch_size) beside it, the batch being a dict of tensors by the names of "
            f"forward's arguments"
        )
    sizes = [tensor.shape[0] for tensor in made.values() if tensor.dim()]
    return {
        name: resize(tensor, batch_size) if tensor.dim() and tensor.shape[0] == sizes[0] else tensor
        for name, tensor in made.items()
    }


def _data(
    spec: str, data: Callable[..., Any], batch_size: int, seq: int | None, start: int
) -> Iterator[dict[str, Tensor]]:
    """Call the user's data function: an iterator of batches, beginning at step ``start``."""
    return iter(_call(spec, data, {"batch_size": batch_size, "seq": seq, "start": start}))


def resize(tensor: Tensor, rows: int) -> Tensor:
    """Repeat or drop samples until there are ``rows``."""
    have = tensor.shape[0]
    if have in (rows, 0):
        return tensor
    return tensor[torch.arange(rows, device=tensor.device) % have]


# -- Hugging Face ------------------------------------------------------------------------------------


def _hugging_face(spec: str) -> ModelSource:
    """Return a model built from a known name or a config file."""
    name = spec.removeprefix("hf:")
    fields = KNOWN_CONFIGS.get(name) or _read_config(name, spec)
    try:
        from transformers import AutoConfig  # the "models" extra, and seconds to import
    except ImportError as error:
        raise InputError(
            f"model {spec!r} needs the package transformers; install shardwright[models]"
        ) from error
    kind = fields["model_type"]
    try:
        rest = {key: value for key, value in fields.items() if key != "model_type"}
        config = AutoConfig.for_model(kind, **rest)
    except Exception as error:
        raise InputError(f"model {spec!r}: the config is refused: {error}") from error
    config.use_cache = False
    task, batch = TASKS.get(kind, ("AutoModelForCausalLM", "tokens"))
    for architecture in fields.get("architectures") or ():
        task, batch = _task_of(architecture, task, batch)
    makers = {"tokens": _tokens, "pairs": _pairs, "images": _images}
    title = Path(name).stem if name.endswith(".json") else name
    return ModelSource(
        title, partial(_from_config, spec, task, config), partial(makers[batch], config)
    )


def _task_of(architecture: str, task: str, batch: str) -> tuple[str, str]:
    """Return the task that an architecture's class name tells (``BertForMaskedLM``)."""
    endings = {
        "ForCausalLM": ("AutoModelForCausalLM", "tokens"),
        "LMHeadModel": ("AutoModelForCausalLM", "tokens"),
        "ForMaskedLM": ("AutoModelForMaskedLM", "tokens"),
        "ForConditionalGeneration": ("AutoModelForSeq2SeqLM", "pairs"),
        "ForImageClassification": ("AutoModelForImageClassification", "images"),
    }
    return next((v for end, v in endings.items() if architecture.endswith(end)), (task, batch))


def _read_config(name: str, spec: str) -> dict[str, Any]:
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise InputError(
            f"model {spec!r} is neither a known name nor a config file; known names are "
            f"{', '.join(KNOWN_CONFIGS)}"
        )
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"model {spec!r}: {path} is not readable JSON: {error}") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("model_type"), str):
        raise InputError(
            f"model {spec!r}: a config must be an object with a model_type; see {path}"
        )
    return fields


def _from_config(spec: str, task: str, config: Any) -> nn.Module:
    import transformers

    build = getattr(transformers, task).from_config
    try:
        try:  # building writes into the config, so each attempt has its own
            return build(copy.deepcopy(config), attn_implementation="sdpa")
        except ValueError:  # a model without attention refuses the choice
            return build(copy.deepcopy(config))
    except Exception as error:
        raise InputError(
            f"model {spec!r} cannot be built: {type(error).__name__}: {error}; check the config"
        ) from error


def _draw(rows: int, columns: int, config: Any, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, config.vocab_size, (rows, columns), generator=generator)


def _length(config: Any, seq: int | None) -> int:
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    chosen = seq or min(DEFAULT_SEQ, limit or DEFAULT_SEQ)
    if limit and chosen > limit and config.model_type != "t5":
        raise InputError(f"seq {chosen} is longer than the model's {limit} positions; lower it")
    return chosen


def _tokens(config: Any, batch_size: int, seq: int | None) -> dict[str, Tensor]:
    tokens = _draw(batch_size, _length(config, seq), config, 1)
    return {"input_ids": tokens, "labels": tokens.clone()}


def _pairs(config: Any, batch_size: int, seq: int | None) -> dict[str, Tensor]:
    length = _length(config, seq)
    sources, targets = _draw(batch_size, length, config, 1), _draw(batch_size, length, config, 2)
    return {"input_ids": sources, "labels": targets}


def _images(config: Any, batch_size: int, seq: int | None) -> dict[str, Tensor]:
    if seq is not None:
        raise InputError(
            f"seq does not apply to {config.model_type}, a model of images; leave it out"
        )
    size = getattr(config, "image_size", 224)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(batch_size, config.num_channels, height, width, generator=generator)
    labels = torch.randint(0, config.num_labels, (batch_size,), generator=generator)
    return {"pixel_values": pixels, "labels": labels}
