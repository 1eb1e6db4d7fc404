"""Samples as bytes and back, without pickle: JSON says what is where, arrays follow as they are."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardwright.errors import InputError

_HEAD = struct.Struct("<Q")
_ALIGNED = 64
_SEQUENCES = ("l", "t")  # list, tuple


def packed(samples: Sequence[Any]) -> list[bytes | memoryview]:
    """Return parts whose concatenation holds the samples."""
    parts: list[bytes | memoryview] = []
    offset = 0

    def put(data: bytes | memoryview) -> int:
        nonlocal offset
        start = offset
        rest = -len(data) % _ALIGNED
        parts.extend((data, bytes(rest)))
        offset += len(data) + rest
        return start

    form = [_form(one, put) for one in samples]
    text = json.dumps(form, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + _HEAD.size) % _ALIGNED)
    return [_HEAD.pack(len(text)), text, *parts]


def _form(value: Any, put: Any) -> Any:
    """Return what JSON says of a value, and put its bytes."""
    if isinstance(value, bool | int | float | str | None):
        return {"v": value}
    if isinstance(value, bytes):
        return {"b": [put(value), len(value)]}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"d": {key: _form(one, put) for key, one in value.items()}}
    if isinstance(value, tuple | list):
        return {_SEQUENCES[isinstance(value, tuple)]: [_form(one, put) for one in value]}
    return _array_form(value, put)


def _array_form(value: Any, put: Any) -> Any:
    is_tensor = type(value).__module__.partition(".")[0] == "torch"
    try:
        found = np.asarray(value.detach().cpu().numpy() if is_tensor else value, order="C")
    except (TypeError, RuntimeError, AttributeError):
        found = np.asarray(None)
    if (
        found.dtype.hasobject
        or found.dtype.names
        or not (is_tensor or isinstance(value, np.ndarray | np.generic))
    ):
        raise InputError(
            "samples that jobs share are made of arrays, tensors, numbers, text, bytes, tuples, lists and dicts with "
            f"text as keys, but one has a {type(value).__name__}; convert it"
        )
    place = put(found.reshape(-1).view(np.uint8).data)
    return {"x" if is_tensor else "a": [found.dtype.str, list(found.shape), place]}


def unpacked(data: bytearray) -> list[Any]:
    """Return the samples; their arrays are views of the data, and may be written."""
    (length,) = _HEAD.unpack_from(data)
    view = memoryview(data)[_HEAD.size + length :]
    return [_value(one, view) for one in json.loads(data[_HEAD.size : _HEAD.size + length])]


def _value(form: dict[str, Any], view: memoryview) -> Any:
    ((kind, what),) = form.items()
    match kind:
        case "v":
            return what
        case "b":
            return bytes(view[what[0] : what[0] + what[1]])
        case "d":
            return {key: _value(one, view) for key, one in what.items()}
        case "t":
            return tuple(_value(one, view) for one in what)
        case "l":
            return [_value(one, view) for one in what]
    return _array(kind, what, view)


def _array(kind: str, what: Any, view: memoryview) -> Any:
    dtype, shape, start = np.dtype(what[0]), what[1], what[2]
    count = int(np.prod(shape, dtype=np.int64))
    found = (
        np.frombuffer(view, dtype, count, start).reshape(shape) if count else np.empty(shape, dtype)
    )
    # Who gets tensors put tensors in, so torch is there; this module does without.
    return sys.modules["torch"].from_numpy(found) if kind == "x" else found
