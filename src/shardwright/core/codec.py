"""Every noun to and from JSON-able values, driven by the nouns' own annotations.

``encode`` gives dicts, lists, strings and numbers which ``json`` can write; ``decode`` builds the
noun again and trusts nothing: unknown or missing keys, wrong types, numbers that are not finite
and runs that would unfold without end are ``ValueError``s which name the place
(``strategy.meshes[1].sizes``). ``dumps`` writes the same bytes for equal values: keys sorted,
floats by ``repr``, short lists on one line, so that a plan can be read and compared in a review.
Files, and what a document must contain, are the business of ``shardwright.files.planfile``.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from shardwright.core.graph import Constant, Operator, TensorSpec
from shardwright.core.program import Call, Message, Segment, Transform, Value

SCHEMA = 1
MAX_UNFOLDED = 1_000_000
MAX_INTEGER = 2**63 - 1
LINE = 100

# Nouns that come by the thousand are written without the fields that have their default value.
SPARSE: frozenset[type] = frozenset(
    {TensorSpec, Operator, Value, Call, Segment, Message, Transform}
)
# Fields that are written only where they say something.
OMITTED = frozenset(
    {
        ("Plan", "measured"),
        ("Objective", "staleness"),
        ("Pipeline", "order"),
        ("Pipeline", "staleness"),
        ("GradientSync", "dtype"),
        ("GradientSync", "error_feedback"),
        ("GradientSync", "compressor"),
        ("GradientSync", "density"),
        ("GradientSync", "apart"),
        ("GradientSync", "feedback"),
        ("Objective", "lost"),
        ("ParameterConfig", "mesh"),
        ("Strategy", "updates"),
        ("Program", "transforms"),
        ("Program", "updates"),
    }
)
# Fields that are written under another key: files had theirs before it meant anything.
WRITTEN_AS = {("GradientSync", "dtype"): "wire_dtype"}
# Keys of older files that meant nothing, and are passed over.
MEANINGLESS = {("GradientSync", "dtype")}
# Sequences that repeat a few distinct entries: written once each, with runs of indices.
RUNS = frozenset({("Strategy", "configs"), ("Strategy", "parameters")})
# Pairs of a name and a constant, which may be an infinity.
CONSTANTS = frozenset({(Operator, "attributes"), (Transform, "constants")})

T = TypeVar("T")


def encode(value: object) -> Any:
    """Turn a noun into dicts, lists, strings and numbers. Raises ValueError for NaN or infinity."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dict(_fields(value))
    if isinstance(value, np.ndarray):
        return _encode_array(cast("NDArray[Any]", value))
    if isinstance(value, tuple | list):
        return list(map(encode, cast("Sequence[object]", value)))
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    raise ValueError(f"JSON has no form for {value!r:.40} ({type(value).__name__})")


def decode(kind: type[T], value: object, where: str = "") -> T:
    """Build a noun from what ``encode`` gave; ``where`` names the value in error messages."""
    return cast("T", _decode(kind, value, where or kind.__name__))


def dumps(value: object) -> str:
    """Write JSON deterministically, one short container per line, with a final newline."""
    return _layout(value, 0) + "\n"


def _fields(value: Any) -> Iterable[tuple[str, Any]]:
    noun = cast("type[Any]", type(value))
    for field in dataclasses.fields(value):
        item = getattr(value, field.name)
        is_sparse = noun in SPARSE or (noun.__name__, field.name) in OMITTED
        if is_sparse and field.default is not dataclasses.MISSING and item == field.default:
            continue
        key = WRITTEN_AS.get((noun.__name__, field.name), field.name)
        if (noun.__name__, field.name) in RUNS:
            yield key, _fold(item)
        elif (noun, field.name) in CONSTANTS:
            yield key, [[name, _encode_constant(constant)] for name, constant in item]
        elif _is_float(noun, field.name):
            yield key, encode(float(item))
        else:
            yield key, encode(item)


def _fold(items: Sequence[object]) -> dict[str, Any]:
    """Store distinct entries once and the sequence as runs ``[index, count]``."""
    distinct = list(dict.fromkeys(items))
    place = {item: index for index, item in enumerate(distinct)}
    runs: list[list[int]] = []
    for item in items:
        if runs and runs[-1][0] == place[item]:
            runs[-1][1] += 1
        else:
            runs.append([place[item], 1])
    return {"distinct": [encode(item) for item in distinct], "runs": runs}


def _unfold(kind: Any, value: object, where: str) -> tuple[Any, ...]:
    table = _mapping(value, where, {"distinct", "runs"})
    distinct = _decode(tuple[kind, ...], table["distinct"], f"{where}.distinct")
    runs = _decode(tuple[tuple[int, int], ...], table["runs"], f"{where}.runs")
    if wrong := [run for run in runs if not 0 <= run[0] < len(distinct) or run[1] < 1]:
        raise ValueError(
            f"{where}.runs: an index is 0 to {len(distinct) - 1} and a count 1 or more, but a run is "
            f"{list(wrong[0])}"
        )
    if sum(count for _, count in runs) > MAX_UNFOLDED:
        raise ValueError(f"{where}.runs: more than {MAX_UNFOLDED} entries")
    return tuple(distinct[index] for index, count in runs for _ in range(count))


def _encode_constant(value: Constant) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    if isinstance(value, tuple):
        return [_encode_constant(item) for item in value]
    return value


def _decode_constant(value: object, where: str) -> Constant:
    if isinstance(value, dict):
        text = _mapping(cast("object", value), where, {"float"})["float"]
        if text not in ("inf", "-inf", "nan"):
            raise ValueError(f"{where}.float: expected 'inf', '-inf' or 'nan'")
        return float(text)
    if isinstance(value, list):
        items = cast("list[object]", value)
        return tuple(_decode_constant(item, f"{where}[{i}]") for i, item in enumerate(items))
    if isinstance(value, float):
        return _number(value, where)
    if isinstance(value, int) and not isinstance(value, bool):
        return _integer(value, where)
    if value is None or isinstance(value, bool | str):
        return value
    raise ValueError(f"{where}: expected a constant, found {_name(value)}")


def _encode_array(array: NDArray[Any]) -> dict[str, Any]:
    flat: list[Any] = array.ravel().tolist()
    values = [None if isinstance(v, float) and math.isnan(v) else v for v in flat]
    return {"shape": list(array.shape), "values": values}


def _decode_array(kind: Any, value: object, where: str) -> NDArray[Any]:
    table = _mapping(value, where, {"shape", "values"})
    shape = _decode(tuple[int, ...], table["shape"], f"{where}.shape")
    values = table["values"]
    dtype = np.dtype(typing.get_args(typing.get_args(kind)[1])[0])
    if not isinstance(values, list) or min(shape, default=0) < 0:
        raise ValueError(f"{where}: expected a shape and a list of values")
    items = cast("list[object]", values)
    if math.prod(shape) != len(items):
        raise ValueError(f"{where}: {len(items)} values do not fill shape {shape}")
    if dtype.kind == "f":
        floats = [math.nan if v is None else _number(v, where) for v in items]
        return np.array(floats, dtype=dtype).reshape(shape)
    info = np.iinfo(dtype)
    integers = [_integer(v, where) for v in items]
    if any(not info.min <= v <= info.max for v in integers):
        raise ValueError(f"{where}: a value does not fit {dtype}")
    return np.array(integers, dtype=dtype).reshape(shape)


@functools.cache
def _hints(noun: type) -> dict[str, Any]:
    return typing.get_type_hints(noun)


@functools.cache
def _is_float(noun: type, name: str) -> bool:
    return _hints(noun)[name] is float


def _decode(kind: Any, value: object, where: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return _decode_noun(cast("type", kind), value, where)
    origin = typing.get_origin(kind)
    if origin is tuple:
        return _decode_tuple(typing.get_args(kind), value, where)
    if origin is Literal:
        return _decode_literal(typing.get_args(kind), value, where)
    if origin in (typing.Union, types.UnionType):
        return None if value is None else _decode(typing.get_args(kind)[0], value, where)
    if origin is np.ndarray:
        return _decode_array(kind, value, where)
    if kind is float:
        return _number(value, where)
    if kind is int:
        return _integer(value, where)
    if isinstance(value, kind):
        return value
    raise ValueError(f"{where}: expected {kind.__name__}, found {_name(value)}")


def _decode_literal(words: tuple[Any, ...], value: object, where: str) -> str:
    if isinstance(value, str) and value in words:
        return value
    found = repr(value[:40]) if isinstance(value, str) else _name(value)
    raise ValueError(f"{where}: expected one of {words}, found {found}")


def _decode_tuple(parts: tuple[Any, ...], value: object, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{where}: expected a list, found {_name(value)}")
    items = cast("list[object]", value)
    if len(parts) == 2 and parts[1] is Ellipsis:
        return tuple(_decode(parts[0], item, f"{where}[{i}]") for i, item in enumerate(items))
    if len(parts) != len(items):
        raise ValueError(f"{where}: expected {len(parts)} entries, found {len(items)}")
    pairs = enumerate(zip(parts, items, strict=True))
    return tuple(_decode(part, item, f"{where}[{i}]") for i, (part, item) in pairs)


def _decode_noun(noun: type, value: object, where: str) -> Any:
    fields = {
        WRITTEN_AS.get((noun.__name__, field.name), field.name): field
        for field in dataclasses.fields(noun)
    }
    optional = {name for name, field in fields.items() if field.default is not dataclasses.MISSING}
    passed_over = {key for name, key in MEANINGLESS if name == noun.__name__}
    table = _mapping(value, where, fields.keys() | passed_over, optional | passed_over)
    made: dict[str, Any] = {}
    for key in [key for key in table if key not in passed_over]:
        made[fields[key].name] = _decode_field(noun, fields[key].name, table[key], f"{where}.{key}")
    try:
        return noun(**made)
    except (ValueError, IndexError, OverflowError) as error:
        raise ValueError(f"{where}: {error}") from error


def _decode_field(noun: type, name: str, item: object, place: str) -> Any:
    kind = _hints(noun)[name]
    if (noun.__name__, name) in RUNS:
        return _unfold(typing.get_args(kind)[0], item, place)
    if (noun, name) in CONSTANTS:
        pairs = _decode(tuple[tuple[str, object], ...], item, place)
        return tuple((key, _decode_constant(v, f"{place}.{key}")) for key, v in pairs)
    return _decode(kind, item, place)


def _mapping(
    value: object, where: str, known: set[str], optional: set[str] | None = None
) -> dict[str, object]:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected an object, found {_name(value)}")
    table = cast("dict[str, object]", value)
    unknown = sorted(set(table) - known)
    missing = sorted(known - set(table) - (optional or set()))
    if unknown or missing:
        words = [f"unknown key {key[:40]!r}" for key in unknown[:3]]
        words += [f"missing key {key!r}" for key in missing[:3]]
        raise ValueError(f"{where}: {', '.join(words)}")
    return table


def _number(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{where}: expected a number, found {_name(value)}")
    if abs(value) > 1e300 or not math.isfinite(value):
        raise ValueError(f"{where}: the number is out of range")
    return float(value)


def _integer(value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{where}: expected an integer, found {_name(value)}")
    if abs(value) > MAX_INTEGER:
        raise ValueError(f"{where}: the integer does not fit 64 bits")
    return value


def _name(value: object) -> str:
    names: dict[type, str] = {
        dict: "an object",
        list: "a list",
        type(None): "null",
        str: "a string",
    }
    return names.get(type(value), type(value).__name__)


def _layout(value: Any, depth: int) -> str:
    flat = json.dumps(value, sort_keys=True, allow_nan=False, ensure_ascii=True)
    if not isinstance(value, dict | list) or not value or len(flat) + depth <= LINE:
        return flat
    pad = "\n" + " " * (depth + 1)
    if isinstance(value, dict):
        table = cast("dict[str, Any]", value)
        rows = [f"{json.dumps(key)}: {_layout(table[key], depth + 1)}" for key in sorted(table)]
        return "{" + pad + ("," + pad).join(rows) + "\n" + " " * depth + "}"
    items = cast("list[Any]", value)
    return (
        "["
        + _wrap([_layout(item, depth + 1) for item in items], depth + 1)
        + "\n"
        + " " * depth
        + "]"
    )


def _wrap(rows: list[str], depth: int) -> str:
    """Fill lines with short entries; give long ones a line each."""
    pad = "\n" + " " * depth
    lines: list[str] = []
    for row in rows:
        fits = (
            lines and "\n" not in row and len(row) <= 20 and len(lines[-1]) + len(row) + 2 <= LINE
        )
        if fits and "\n" not in lines[-1]:
            lines[-1] += f", {row}"
        else:
            lines.append(row)
    return pad + ("," + pad).join(lines)
