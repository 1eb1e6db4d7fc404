"""Models of transformers, from a known name or a config file, with a batch for what they learn."""

from __future__ import annotations

import copy
import difflib
import inspect
import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.errors import InputError
from shardwright.runtime.capture.mixed import Mixed
from shardwright.runtime.capture.pictures import Pictures
from shardwright.runtime.capture.places import first_line
from shardwright.runtime.capture.recordings import Recordings
from shardwright.runtime.capture.source import ModelSource, check_numbers
from shardwright.runtime.capture.tasks import (
    CAPTIONS,
    KNOWN_CONFIGS,
    SENSES,
    TASK_ENDINGS,
    TASKS,
    USUAL_TASKS,
    Task,
)

DEFAULT_SEQ = 128
DEFAULT_SOUND = 16000  # one second, as the models of speech are fed
LARGEST_CONFIG = 4 * 2**20  # bytes


def hugging_face(spec: str) -> ModelSource:
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
        config = AutoConfig.for_model(kind, **copy.deepcopy(rest))
    except Exception as error:
        raise InputError(f"model {spec!r}: the config is refused: {error}") from error
    config.use_cache = False
    task, batch = _task_of(spec, config, fields.get("architectures") or ())
    title = Path(name).stem if name.endswith(".json") else name
    example = partial(_example, spec, batch, config)
    return ModelSource(
        title,
        partial(_from_config, spec, task, config),
        example,
        # Patches of all images lie one behind the other: rows that no batch of another size could be told of.
        make_sample=example if batch == "pictures" else None,
    )


def _task_of(spec: str, config: Any, architectures: Sequence[Any]) -> Task:
    """Return what a model learns: what the name of its class tells (``BertForMaskedLM``), else what is usual for its
    type. Raises InputError where that is nothing a batch is known for."""
    known = TASKS.get(config.model_type)
    if known and known[1] in ("spectrograms", "captions", "pictures"):
        return known  # its one task has a name that means another for models of text
    for task in _named_tasks(architectures) or _usual_tasks(config, known):
        if _has_class(task[0], config) and _holds(task[1], config):
            return task
    named = ", ".join(map(str, architectures)) or "no architectures"
    raise InputError(
        f"model {spec!r}: no example batch is known for what a {config.model_type} model ({named}) "
        f"learns; {_BY_HAND}"
    )


def _named_tasks(architectures: Sequence[Any]) -> list[Task]:
    """Return what the names of classes tell (``BertForMaskedLM``)."""
    return [
        task
        for architecture in architectures
        for end, tasks in TASK_ENDINGS.items()
        if str(architecture).endswith(end)
        for task in tasks
    ]


def _usual_tasks(config: Any, known: Task | None) -> tuple[Task, ...]:
    if known is not None:
        return (known,)
    return (CAPTIONS,) if _compares(config) else USUAL_TASKS


def _holds(batch: str, config: Any) -> bool:
    """Whether a config has a part for the sense that a batch holds besides text; pairs of texts are an encoder's and a
    decoder's, and text alone is not what a class learns that is one of text with images."""
    import transformers

    if batch == "pairs":
        return bool(config.is_encoder_decoder)
    if batch == "tokens":
        tasks = (transformers.AutoModelForImageTextToText, transformers.AutoModelForCausalLM)
        built = [one._model_mapping.get(type(config), None) for one in tasks]
        return built[0] is None or built[0] is not built[1]
    return any(hasattr(config, part) for part in SENSES.get(batch, ("model_type",)))


_BY_HAND = "write a function that returns (module, batch), and name it as file.py:function"


def _has_class(task: str, config: Any) -> bool:
    """Whether transformers has a class for a task that models of this type can be built as."""
    import transformers

    classes = getattr(getattr(transformers, task), "_model_mapping", None)
    return classes is None or type(config) in classes


def _compares(config: Any) -> bool:
    """Whether models of this type are taught by images and their captions, as CLIP is."""
    import transformers

    if not {"text_config", "vision_config"} <= config.sub_configs.keys():
        return False
    built = transformers.MODEL_MAPPING.get(type(config), None)
    forward = getattr(built, "forward", None)
    return forward is not None and "return_loss" in inspect.signature(forward).parameters


def _example(
    spec: str, batch: str, config: Any, batch_size: int, seq: int | None
) -> dict[str, Tensor]:
    """Make an example batch. Raises InputError where the config does not say what it needs."""
    try:
        return MAKERS[batch](config, batch_size, seq)
    except (AttributeError, TypeError, RuntimeError) as error:
        raise InputError(
            f"model {spec!r}: no example batch of {batch} can be made from the config of a "
            f"{config.model_type} model ({first_line(error)}); {_BY_HAND}"
        ) from error


def _read_config(name: str, spec: str) -> dict[str, Any]:
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        near = difflib.get_close_matches(name, KNOWN_CONFIGS, 5, 0.0)
        raise InputError(
            f"model {spec!r} is neither a known name nor a config file; the known names nearest to "
            f"it are {', '.join(near)}, all are in docs/reference/coverage.md"
        )
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_CONFIG + 1)
        if len(data) > LARGEST_CONFIG:
            raise ValueError(f"a config has at most {LARGEST_CONFIG >> 20} MiB")
        fields = json.loads(data.decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"model {spec!r}: {path} is not readable JSON: {error}") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("model_type"), str):
        raise InputError(
            f"model {spec!r}: a config must be an object with a model_type; see {path}"
        )
    return fields


def _from_config(spec: str, task: str, config: Any) -> nn.Module:
    import transformers

    chosen = getattr(transformers, task)
    build = getattr(chosen, "from_config", None) or chosen._from_config
    try:
        try:  # building writes into the config, so each attempt has its own
            module = build(copy.deepcopy(config), attn_implementation="sdpa")
        except ValueError:  # a model without attention refuses the choice
            module = build(copy.deepcopy(config))
    except Exception as error:
        raise InputError(
            f"model {spec!r} cannot be built: {first_line(error)}; check the config"
        ) from error
    if task == "AutoModel":  # a loss has to be asked for
        module.forward = partial(module.forward, return_loss=True)
    return module


# -- example batches --------------------------------------------------------------------------------


def _draw(shape: tuple[int, ...], high: int, seed: int) -> Tensor:
    check_numbers(math.prod(shape), f"at {shape[0]:,} samples of {math.prod(shape[1:]):,}")
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def _noise(shape: tuple[int, ...]) -> Tensor:
    check_numbers(math.prod(shape), f"at {shape[0]:,} samples of {math.prod(shape[1:]):,}")
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def _length(config: Any, seq: int | None) -> int:
    limit = _most_positions(config)
    chosen = seq or min(DEFAULT_SEQ, limit or DEFAULT_SEQ)
    if limit and chosen > limit and config.model_type != "t5":
        raise InputError(f"seq {chosen} is longer than the model's {limit} positions; lower it")
    return chosen


def _most_positions(config: Any) -> int | None:
    names = ("max_position_embeddings", "n_positions", "max_target_positions", "context_length")
    found = (getattr(config, name, None) for name in names)
    return next((one for one in found if one and one > 0), None)  # XLNet's -1: any number


def _tokens(config: Any, batch_size: int, seq: int | None) -> dict[str, Tensor]:
    tokens = _draw_text(config, batch_size, seq)
    return {"input_ids": tokens, "labels": tokens.clone()}


def _draw_text(config: Any, batch_size: int, seq: int | None, seed: int = 1) -> Tensor:
    return _draw((batch_size, _length(config, seq)), config.vocab_size, seed)


def _texts(config: Any, batch_size: int, seq: int | None) -> dict[str, Tensor]:
    labels = _draw((batch_size,), config.num_labels, 2)
    return {"input_ids": _draw_text(config, batch_size, seq), "labels": labels}


def _words(config: Any, batch_size: int, seq: int | None) -> dict[str, Tensor]:
    tokens = _draw_text(config, batch_size, seq)
    return {"input_ids": tokens, "labels": _draw(tuple(tokens.shape), config.num_labels, 2)}


def _spans(config: Any, batch_size: int, seq: int | None) -> dict[str, Tensor]:
    tokens = _draw_text(config, batch_size, seq)
    return {
        "input_ids": tokens,
        "start_positions": _draw((batch_size,), tokens.shape[1], 2),
        "end_positions": _draw((batch_size,), tokens.shape[1], 3),
    }


def _pairs(config: Any, batch_size: int, seq: int | None) -> dict[str, Tensor]:
    return {
        "input_ids": _draw_text(config, batch_size, seq),
        "labels": _draw_text(config, batch_size, seq, 2),
    }


def _pixels(config: Any, batch_size: int, seq: int | None) -> Tensor:
    if seq is not None:
        raise InputError(
            f"seq does not apply to {config.model_type}, a model of images; leave it out"
        )
    return _noise((batch_size, config.num_channels, *_image_size(config)))


def _image_size(config: Any) -> tuple[int, int]:
    size = getattr(config, "image_size", 224)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return height, width


def _images(config: Any, batch_size: int, seq: int | None) -> dict[str, Tensor]:
    labels = _draw((batch_size,), config.num_labels, 1)
    return {"pixel_values": _pixels(config, batch_size, seq), "labels": labels}


def _maps(config: Any, batch_size: int, seq: int | None) -> dict[str, Tensor]:
    labels = _draw((batch_size, *_image_size(config)), config.num_labels, 1)
    return {"pixel_values": _pixels(config, batch_size, seq), "labels": labels}


def _sounds(config: Any, batch_size: int, seq: int | None) -> dict[str, Tensor]:
    """Sounds of ``seq`` numbers, of which the model's convolutions must leave at least one frame."""
    least = 1
    for kernel, stride in zip(config.conv_kernel[::-1], config.conv_stride[::-1], strict=True):
        least = (least - 1) * stride + kernel
    length = seq or DEFAULT_SOUND
    if length < least:
        raise InputError(
            f"seq counts the samples of a sound, of which {config.model_type} needs at least "
            f"{least}, not {length}; raise it"
        )
    labels = _draw((batch_size,), config.num_labels, 1)
    return {"input_values": _noise((batch_size, length)), "labels": labels}


def _spectrograms(config: Any, batch_size: int, seq: int | None) -> dict[str, Tensor]:
    frames = 2 * config.max_source_positions  # halved by the first convolutions
    return {
        "input_features": _noise((batch_size, config.num_mel_bins, frames)),
        "labels": _draw((batch_size, _length(config, seq)), config.vocab_size, 1),
    }


def _captions(config: Any, batch_size: int, seq: int | None) -> dict[str, Tensor]:
    text, vision = config.text_config, config.vision_config
    tokens = _draw((batch_size, _length(text, seq)), text.vocab_size, 1)
    return {"input_ids": tokens, "pixel_values": _pixels(vision, batch_size, None)}


def _pictures(config: Any, batch_size: int, seq: int | None) -> dict[str, Tensor]:
    return _mixed(Pictures, config, batch_size, seq)


def _recordings(config: Any, batch_size: int, seq: int | None) -> dict[str, Tensor]:
    return _mixed(Recordings, config, batch_size, seq)


def _mixed(
    kind: Callable[[Any], Mixed], config: Any, batch_size: int, seq: int | None
) -> dict[str, Tensor]:
    text = config.get_text_config()
    most = _most_positions(text) or math.inf

    def length(features: int) -> int:
        return _length(text, seq or int(min(features + DEFAULT_SEQ, most)))

    try:
        return kind(config).batch(batch_size, length, _draw, _noise)
    except InputError:
        raise
    except Exception as error:  # forward of any model may run here
        raise TypeError(first_line(error)) from error


MAKERS = {
    "tokens": _tokens,
    "pairs": _pairs,
    "texts": _texts,
    "words": _words,
    "spans": _spans,
    "images": _images,
    "maps": _maps,
    "sounds": _sounds,
    "spectrograms": _spectrograms,
    "captions": _captions,
    "pictures": _pictures,
    "recordings": _recordings,
}
