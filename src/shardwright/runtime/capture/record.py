"""Record operators while they run on meta tensors.

The recorder is an eager machine without storage: ``emit`` runs one operator on meta tensors, keeps
the call, and hands out its result. So shapes, dtypes, aliasing and whether a gradient flows are
never guessed; they are what torch did. Results that are their own argument unchanged (an expand to
the same shape, dropout with p = 0) leave no trace.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from keyword import iskeyword
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from shardwright.runtime.capture.lying import laid_out, memory_of

aten = torch.ops.aten
# Arguments that ask for sparse gradients: shards, sums and messages are dense.
SPARSE = ("sparse", "sparse_grad")


class Unsupported(Exception):
    """Something in the exported graph that cannot be written as pure operators."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Stands in a call for the ``index``-th entry of ``Operator.inputs``."""

    index: int


@dataclass(eq=False, slots=True)
class Value:
    """One tensor that never changes: an entry of the module, or a result of a record."""

    meta: Tensor
    producer: int = -1


@dataclass(eq=False, slots=True)
class Record:
    """One operator call. ``path`` lists the paths of the modules around it, outermost first."""

    name: str
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Value, ...]
    path: tuple[str, ...]


@lru_cache(maxsize=4096)
def parameter_names(target: Callable[..., Any]) -> tuple[tuple[str, Any], ...]:
    """Return an operator's argument names and defaults (``inspect.Parameter.empty``: none)."""
    schema = getattr(target, "_schema", None)
    if schema is None:
        return tuple((p.name, p.default) for p in inspect.signature(target).parameters.values())
    return tuple(
        (arg.name, arg.default_value if arg.has_default_value() else inspect.Parameter.empty)
        for arg in schema.arguments
    )


def named_arguments(
    target: Callable[..., Any], args: Iterable[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return every argument of a call by name, defaults included."""
    names = parameter_names(target)
    return {**dict(names), **dict(zip((name for name, _ in names), args, strict=False)), **kwargs}


def bind(
    target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Write a call with its leading tensors positional and everything else by name, unless Python has that name
    for itself (``uniform``'s ``from``).

    Arguments equal to their default are left out, and layout, memory and device hints are, except
    for ``device``: None, which asks whoever runs the call to fill in its own.
    """
    names = parameter_names(target)
    named = dict(zip((name for name, _ in names), args, strict=False)) | kwargs
    positional: list[Any] = []
    nameless = max((place for place, (name, _) in enumerate(names) if iskeyword(name)), default=-1)
    for place, (name, default) in enumerate(names):
        is_tensor = name in named and any(True for _ in tensors_in(named[name]))
        if not is_tensor and place > nameless:
            break
        positional.append(named.pop(name, default))
    rest: dict[str, Any] = {}
    for name, default in names[len(positional) :]:
        if name == "device":
            rest[name] = None
        elif name in ("layout", "pin_memory", "memory_format") or name not in named:
            continue
        elif any(True for _ in tensors_in(named[name])) or named[name] != default:
            rest[name] = named[name]
    return tuple(positional), rest


def tensors_in(argument: Any) -> Iterator[Value]:
    """Yield the values in an argument, nested in lists or not."""
    if isinstance(argument, Value):
        yield argument
    elif isinstance(argument, (list, tuple)):
        for item in argument:
            yield from tensors_in(item)


def map_values(argument: Any, change: Callable[[Value], Any]) -> Any:
    """Return an argument with every value in it replaced; sequences become lists."""
    if isinstance(argument, Value):
        return change(argument)
    if isinstance(argument, (list, tuple)):
        return [map_values(item, change) for item in argument]
    return argument


def substitute(argument: Any, tensors: Sequence[Tensor]) -> Any:
    """Return an argument of a call with tensors in place of slots."""
    if isinstance(argument, Slot):
        return tensors[argument.index]
    if isinstance(argument, (list, tuple)):
        return [substitute(item, tensors) for item in argument]
    return argument


def _dense(target: Callable[..., Any], named: dict[str, Any], name: str) -> bool:
    """Ask for dense gradients, and say whether sparse ones were asked for."""
    asked = bool(named.pop(name, False))
    if (name, inspect.Parameter.empty) in parameter_names(target):
        named[name] = False
    return asked


def shares_storage(one: Value, other: Value) -> bool:
    """Whether torch gave two values the same memory, so that writing one would change the other."""
    return memory_of(one.meta) == memory_of(other.meta)


def _signature(argument: Any) -> Any:
    """Return what of an argument decides how an operator's results look, as a part of a key."""
    if isinstance(argument, Value):
        meta = argument.meta
        is_seen_as = meta.is_conj(), meta.is_neg()
        return meta.shape, meta.stride(), meta.dtype, meta.requires_grad, *is_seen_as
    if isinstance(argument, (list, tuple)):
        return tuple([_signature(item) for item in argument])
    return type(argument), argument  # 1, 1.0 and True are one key, but not one argument


def _is_plain(tensor: Tensor, others: set[int]) -> bool:
    """Whether shape, strides and dtype say all of a tensor, and it shares no memory with ``others``: complex
    ones may be read conjugated."""
    is_part = bool(tensor.storage_offset()) or memory_of(tensor) in others
    return not (is_part or tensor.is_complex())


def _is_same(one: Tensor, other: Tensor) -> bool:
    return (
        memory_of(one) == memory_of(other)
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.dtype == other.dtype
        and one.storage_offset() == other.storage_offset()
        and one.requires_grad == other.requires_grad
        # Views that read the same memory otherwise: conjugated, or negated (imaginary parts of such).
        and one.is_conj() == other.is_conj()
        and one.is_neg() == other.is_neg()
    )


@dataclass
class Recorder:
    """Runs operators on meta tensors and remembers them.

    Equal layers ask the same of torch again: how such results look is asked once.
    """

    records: list[Record] = field(default_factory=list)
    node_name: str = "node"
    path: tuple[str, ...] = ()
    notes: dict[str, None] = field(default_factory=dict[str, None])
    _names: set[str] = field(default_factory=set)
    _detached: dict[Value, Value] = field(default_factory=dict)
    _looks: dict[Any, Tensor] = field(default_factory=dict)

    def enter(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Value:
        """Return a value which enters from outside, of a tensor's shape."""
        meta = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device="meta"
        )
        return Value(meta.requires_grad_(tensor.requires_grad))

    def emit(self, target: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run an operator. Returns its value, a list of values, or None, as the operator does."""
        bound, named = bind(target, args, kwargs)
        are_sparse = [_dense(target, named, name) for name in SPARSE]
        if any(are_sparse):
            self.notes["sparse gradients (sparse=True) are dense here, with equal values"] = None
        inputs = [*tensors_in(bound), *tensors_in(list(named.values()))]
        result = self._run(target, bound, named)
        if not inputs and isinstance(result, (bool, int, float, torch.dtype)):
            return result  # what Python has worked out already, from dtypes or sizes
        if "device" in named and not inputs and isinstance(result, Tensor):
            named.setdefault(
                "dtype", result.dtype
            )  # else the default dtype of the run would decide
        if isinstance(result, Tensor):
            same = next((value for value in inputs if _is_same(value.meta, result)), None)
            if (
                same is not None
            ):  # with its gradient only if it is that very tensor, not a view of it
                return same if same.meta is result else self.cut(same)
        bound = map_values(bound, self.cut)
        named = {name: map_values(value, self.cut) for name, value in named.items()}
        return self.append(target, bound, named, result)

    def append(
        self, target: Callable[..., Any], args: Any, kwargs: dict[str, Any], result: Any
    ) -> Any:
        """Keep a call whose meta result is known."""
        producer = len(self.records)
        metas = [result] if isinstance(result, Tensor) else list(result or ())
        if any(not isinstance(meta, Tensor) for meta in metas):
            raise Unsupported(f"{target} returns something that is not a tensor")
        outputs = tuple(Value(meta, producer) for meta in metas)
        record = Record(self._fresh_name(), target, tuple(args), kwargs, outputs, self.path)
        self.records.append(record)
        if isinstance(result, Tensor):
            return outputs[0]
        return None if result is None else list(outputs)

    def replace(self, records: list[Record], node_name: str) -> None:
        """Go on from other records, behind a node."""
        names = {record.name for record in records}
        if len(names) < len(records):
            raise Unsupported("records of one name")
        self.records, self.node_name, self._names = records, node_name, names

    def _run(self, target: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        given = _signature([args, *kwargs.items()])
        key = target, torch.is_grad_enabled(), torch.get_default_dtype(), given
        try:
            known = self._looks.get(key)
        except TypeError:  # an argument that is no key
            return self._run_anew(target, args, kwargs)
        if known is not None:
            form = known.shape, known.stride()
            return torch.empty_strided(
                *form, dtype=known.dtype, device="meta", requires_grad=known.requires_grad
            )
        result = self._run_anew(target, args, kwargs)
        inputs = {memory_of(one.meta) for one in tensors_in([args, *kwargs.values()])}
        if (
            isinstance(target, OpOverload)
            and isinstance(result, Tensor)
            and _is_plain(result, inputs)
        ):
            self._looks[key] = result
        return result

    def _run_anew(self, target: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        arguments = map_values(args, lambda value: value.meta)
        named = {name: map_values(value, lambda v: v.meta) for name, value in kwargs.items()}
        if "device" in named:
            named["device"] = torch.device("meta")
        result = target(*arguments, **named)
        return laid_out(target, arguments, named, result)

    def cut(self, value: Value) -> Value:
        """Return a value as it is seen here: inside a ``torch.no_grad`` region without its gradient."""
        if torch.is_grad_enabled() or not value.meta.requires_grad:
            return value
        if value not in self._detached:
            meta = value.meta.detach()
            self._detached[value] = self.append(aten.detach.default, [value], {}, meta)
        return self._detached[value]

    def _fresh_name(self) -> str:
        name, count = self.node_name, 0
        while name in self._names:
            count += 1
            name = f"{self.node_name}.{count}"
        self._names.add(name)
        return name
