"""A module as a factory makes it, its parameters without memory until shards are cut from them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardwright.errors import InputError
from shardwright.runtime.capture.copying import copy_module
from shardwright.runtime.capture.source import remember_maker
from shardwright.runtime.deferred.recorder import Recorder
from shardwright.runtime.deferred.replay import GENERATOR, Replay, Undeferrable
from shardwright.runtime.deferred.trace import Ref


@dataclass(frozen=True)
class Built:
    """A built module. ``note`` says why it was built whole, "" where it was not."""

    module: nn.Module
    note: str = ""


class Deferred:
    """The parameters that a module on the meta device would have had, to be made one by one."""

    def __init__(self, replay: Replay, refs: dict[str, Ref], left: Tensor) -> None:
        self._replay = replay
        self._refs = refs
        self._left = left  # the default generator as the factory left it, draws not made

    def __contains__(self, name: str) -> bool:
        return name in self._refs

    def values(self, names: set[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield parameters, each whole and alone in memory; drop one before asking for the next.

        Afterwards the default generator is where a whole build would have left it, unless it was
        used meanwhile.
        """
        wanted = {name: ref for name, ref in self._refs.items() if name in names}
        yield from self._replay.each(wanted)
        end = self._replay.advance()
        if torch.equal(GENERATOR.get_state(), self._left):
            GENERATOR.set_state(end)


class Borrowed:
    """Parameters that another module holds, to be copied one by one."""

    def __init__(self, lender: nn.Module) -> None:
        self._parameters = dict(lender.named_parameters())

    def __contains__(self, name: str) -> bool:
        return name in self._parameters

    def values(self, names: set[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield copies of parameters; drop one before asking for the next."""
        for name in names:
            yield name, self._parameters[name].detach().clone()


_deferred: WeakKeyDictionary[nn.Module, Deferred | Borrowed] = WeakKeyDictionary()


def deferred_of(module: nn.Module) -> Deferred | Borrowed | None:
    """Return how to make a module's parameters, None where it holds them."""
    return _deferred.get(module)


def replace_parameters(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Put other tensors in the place of parameters, under all names that each has."""
    old = {name: module.get_parameter(name) for name in values}
    new = {
        id(old[name]): nn.Parameter(value, requires_grad=old[name].requires_grad)
        for name, value in values.items()
    }
    for child in module.modules():
        for key, held in child._parameters.items():
            child._parameters[key] = new.get(id(held), held)


def build_deferred(make: Callable[[], nn.Module]) -> Built:
    """Build a module with its parameters on the meta device, to be made later bit by bit as ``make``
    makes them; whole where that is not possible.

    ``make`` may be called a second time then. Buffers and other tensors have their values.
    """
    numbers = random.getstate(), np.random.get_state(), GENERATOR.get_state()

    def again() -> nn.Module:
        random.setstate(numbers[0])
        np.random.set_state(numbers[1])
        GENERATOR.set_state(numbers[2])
        return make()

    try:
        module = _settled(make)
        remember_maker(module, again)
        return Built(module)
    except Exception as error:  # noqa: BLE001 - whatever it is, a plain build shows it again or works
        reason = (
            str(error) if isinstance(error, Undeferrable) else f"{type(error).__name__}: {error}"
        )
    module = again()
    remember_maker(module, again)  # should its parameters be released
    return Built(module, f"every rank builds the whole module before it keeps its shards: {reason}")


def copy_deferred(module: nn.Module) -> nn.Module:
    """Copy a module with its parameters on the meta device, to be taken from the original bit by bit.

    The original must hold its values and keep them until an executor has cut its shards.
    """
    metas = {
        id(one): nn.Parameter(one.detach().to("meta"), requires_grad=one.requires_grad)
        for one in module.parameters()
    }
    copied = copy_module(module, dict(metas))
    _deferred[copied] = Borrowed(module)
    return copied


def built_from(model: nn.Module | Callable[[], Any]) -> Built:
    """Return a user's module as it is, or build it from a factory of a module or (module, batch)."""
    if isinstance(model, nn.Module):
        return Built(model)
    if not callable(model):
        raise InputError(
            f"an executor trains a torch.nn.Module or what a function makes, not {model!r:.40}; pass one of these"
        )

    def make() -> nn.Module:
        made = model()
        module = made[0] if isinstance(made, tuple) and made else made
        if not isinstance(module, nn.Module):
            raise InputError(
                "a factory must return a torch.nn.Module or (module, batch), but this one returned "
                f"{type(module).__name__}"
            )
        return module

    return build_deferred(make)


def _settled(make: Callable[[], nn.Module]) -> nn.Module:
    """Build, and replace fake tensors: parameters by meta ones, others by their values."""
    recorder = Recorder()
    with recorder.recording():
        module = make()
    recorder.look()
    if recorder.failure:
        raise Undeferrable(recorder.failure)
    parameters = dict(module.named_parameters())
    refs = {name: recorder.ref(p) for name, p in parameters.items() if recorder.is_our_fake(p)}
    storages = [ref.storage for ref in refs.values()]
    if len(set(storages)) < len(storages):
        raise Undeferrable("parameters share memory without being one")
    with _Settling(recorder, {id(p) for p in parameters.values()}, set(storages)):
        module = copy_module(module, {})
    recorder.replay.forget()
    if recorder.failure:
        raise Undeferrable(recorder.failure)
    _deferred[module] = Deferred(recorder.replay, refs, GENERATOR.get_state())
    return module


class _Settling(TorchFunctionMode):
    """Lets a deep copy have meta parameters and other tensors with values in place of fake ones."""

    def __init__(self, recorder: Recorder, parameters: set[int], storages: set[int]) -> None:
        super().__init__()
        self._recorder, self._parameters, self._storages = recorder, parameters, storages
        self._made: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.__deepcopy__ or not self._recorder.is_our_fake(args[0]):
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            is_own = id(tensor) in self._parameters
            memo[id(tensor)] = self._meta(tensor) if is_own else self._real(tensor)
        return memo[id(tensor)]

    def _meta(self, tensor: Tensor) -> Tensor:
        size, stride = tuple(tensor.shape), tuple(tensor.stride())
        meta = torch.empty_strided(size, stride, dtype=tensor.dtype, device="meta")
        return nn.Parameter(meta, requires_grad=tensor.requires_grad)

    def _real(self, tensor: Tensor) -> Tensor:
        ref = self._recorder.ref(tensor)
        if ref.storage in self._storages or not tensor.is_leaf:
            raise Undeferrable("a tensor outside of its parameters is made of one of them")
        if ref.storage not in self._made:
            self._made[ref.storage] = self._recorder.values([ref])[0]
        with torch.no_grad():
            result = ref.on(self._made[ref.storage].untyped_storage())
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(result, requires_grad=tensor.requires_grad)
        return result.requires_grad_(tensor.requires_grad)
