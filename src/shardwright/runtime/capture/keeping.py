"""What a module keeps in Python between calls: attributes that are neither parameters nor buffers,
and the random numbers of Python and NumPy, which belong to nobody.

A graph holds what these were while it was traced. A fingerprint says whether a call changed them; it
holds values of numbers and containers, and identity and version of tensors, so that it costs little.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import pickle
import random
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# Elements of a container, and bytes of an array, that are looked at.
LONGEST = 10_000
LARGEST_ARRAY = 1 << 20
DEEPEST = 6

_MACHINERY = frozenset(vars(nn.Module())) | {"forward"}
PLAIN = (int, float, complex, str, bytes, type(None))

Attribute = tuple[str, str]  # path of the module, name of the attribute
Fingerprint = Mapping[Attribute, Any]


class _Same:
    """Equal to another only if it is of the same object; keeps it alive, so that ids stay unique."""

    def __init__(self, held: Any, version: Any = 0) -> None:
        self.held, self.version = held, version

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Same) and self.held is other.held and self.version == other.version
        )

    __hash__ = None  # type: ignore[assignment]


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """Return what a module holds besides what every module has."""
    return {name: value for name, value in vars(module).items() if name not in _MACHINERY}


def fingerprint(module: nn.Module) -> Fingerprint:
    """Return a value per attribute of every submodule, equal to a later one if nothing changed."""
    seen: set[int] = set()
    return {
        (path, name): _frozen(value, 0, seen)
        for path, child in module.named_modules()
        for name, value in own_attributes(child).items()
    }


def changes(before: Fingerprint, after: Fingerprint) -> list[Attribute]:
    """Return the attributes that were made, removed or changed."""
    missing = object()
    return [
        key
        for key in dict.fromkeys((*before, *after))
        if not bool(before.get(key, missing) == after.get(key, missing))
    ]


@contextlib.contextmanager
def changes_in(module: nn.Module) -> Iterator[set[Attribute]]:
    """Yield a set that receives what calls of a module change: export takes such changes back.

    A buffer that was given another tensor is written instead, as a trace can hold it.
    """
    found: set[Attribute] = set()
    before: list[tuple[Fingerprint, dict[str, Tensor]]] = []

    def begin(*_: Any) -> None:
        before.append((fingerprint(module), dict(module.named_buffers())))

    def end(*_: Any) -> None:
        attributes, buffers = before.pop()
        found.update(changes(attributes, fingerprint(module)))
        for name, old in buffers.items():
            path, _dot, last = name.rpartition(".")
            owner = module.get_submodule(path)
            new = owner._buffers.get(last)
            if new is not None and new is not old:
                with torch.no_grad():
                    old.copy_(new)
                owner._buffers[last] = old

    handles = [module.register_forward_pre_hook(begin), module.register_forward_hook(end)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def attribute_state(module: nn.Module, name: str) -> Any:
    """Return the fingerprint of one attribute."""
    return _frozen(vars(module).get(name, _MACHINERY), 0, set())


def _frozen(value: Any, depth: int, seen: set[int]) -> Any:
    if isinstance(value, PLAIN):
        return type(value), value
    if isinstance(value, np.generic):
        return type(value), value.tobytes()
    if isinstance(value, Tensor):
        return _Same(value, None if value.is_inference() else value._version)
    generator = generator_state(value)
    if generator is not None:
        return generator
    if isinstance(value, itertools.count):
        return repr(value)
    if isinstance(value, np.ndarray):
        return _Same(value, value.tobytes() if value.nbytes <= LARGEST_ARRAY else 0)
    if depth == DEEPEST or isinstance(value, (nn.Module, type)):
        return _Same(value)
    if isinstance(value, (set, frozenset)):
        return type(value), len(value), frozenset(itertools.islice(map(hash, value), LONGEST))
    held = getattr(value, "__dict__", None)
    is_container = isinstance(value, (list, tuple, deque, Mapping))
    if not is_container and (held is None or callable(value)):
        return _Same(value)
    if id(value) in seen and not isinstance(value, tuple):  # shared, or holding itself
        return _Same(value)
    seen.add(id(value))
    items: list[Any] = []
    if isinstance(value, Mapping):
        items += itertools.chain.from_iterable(itertools.islice(value.items(), LONGEST))
    elif is_container:
        items += itertools.islice(value, LONGEST)
    if held:
        items += itertools.chain.from_iterable(held.items())
    count = len(value) if is_container else 0
    return type(value), count, [_frozen(item, depth + 1, seen) for item in items]


def generator_state(value: Any) -> Any:
    """Return the state of a generator of random numbers, None for anything else."""
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state(legacy=False))
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    return None


# -- Python's and NumPy's own random numbers ------------------------------------------------------------


def python_numbers() -> Any:
    """Return the states of Python's and NumPy's random numbers, equal if nothing was drawn."""
    return random.getstate(), pickle.dumps(np.random.get_state(legacy=False))


@contextlib.contextmanager
def untouched_numbers() -> Iterator[None]:
    """Put the random numbers of Python and NumPy back to where they stood."""
    before = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


# -- taking a state and putting it back -------------------------------------------------------------------

State = Mapping[str, Mapping[str, Any]]


def take_state(module: nn.Module) -> State:
    """Return copies of the attributes of every submodule."""
    copies = _Copies()
    return {
        path: {name: copies.of(value) for name, value in own_attributes(child).items()}
        for path, child in module.named_modules()
    }


def put_state(module: nn.Module, state: State) -> None:
    """Give every submodule the attributes that it had; the state can be put again."""
    copies = _Copies()
    for path, child in module.named_modules():
        held, wanted = vars(child), state.get(path, {})
        for name in own_attributes(child).keys() - wanted.keys():
            del held[name]
        held.update({name: copies.of(value) for name, value in wanted.items()})


class _Copies:
    """Copies what can change by itself; what is shared stays shared."""

    def __init__(self) -> None:
        self.made: dict[int, Any] = {}

    def of(self, value: Any) -> Any:
        if isinstance(value, (*PLAIN, nn.Module, type)) or callable(value):
            return value
        if id(value) not in self.made:
            self.made[id(value)] = self._copy(value)
        return self.made[id(value)]

    def _copy(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value if value.requires_grad else value.detach().clone()
        if type(value) is deque:
            return deque(map(self.of, value), value.maxlen)
        if type(value) in (list, tuple, set):
            return type(value)(map(self.of, value))
        if type(value) is dict:
            return {key: self.of(item) for key, item in value.items()}
        try:
            return copy.deepcopy(value, dict(self.made))
        except Exception:  # noqa: BLE001 - what cannot be copied is shared
            return value
