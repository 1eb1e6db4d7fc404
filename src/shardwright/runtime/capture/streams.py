"""Which layers of a deep model ask the same of torch, one after the other, so that a few stand for all.

The whole model runs once without values, and every call of torch with its arguments is written down: that takes a
fraction of exporting it, which notes the same calls and nothing else. It runs on the meta device, each operator once for
equal looks of its arguments, and is told of the device that it is on. Calls name tensors by where they come from: made
in this layer, or by the one before, behind an earlier list of layers, a parameter of the layer, or of the model. Where
all layers but the first and the last have equal calls so written, and the model without most of them has, but for these,
the very calls of the whole one, exporting it and repeating a layer gives what exporting the whole would. Only numbers
by which a part of a tensor is picked may differ: an expert reads the column of its number. They must count on, by as
much from every layer to the next. What Python does in between
need not be known: it ran, for every layer, and what it led to was compared. Whatever may act otherwise than by its
results (writes in place, hooks, gradients taken, calls past torch's own functions) leaves the model to be exported whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.runtime.capture.applied import applied, run_function
from shardwright.runtime.capture.counting import written_by
from shardwright.runtime.capture.layers import (
    FIRST,
    Layers,
    Part,
    Unclear,
    Written,
    deep_lists,
    place_in,
    shortened,
    stood_for,
)
from shardwright.runtime.capture.lying import memory_of

_PLAIN = (
    int, str, bool, complex, bytes, type(None), type(...), torch.dtype, torch.device, torch.layout,
    torch.memory_format,
)  # fmt: skip
_ACTS = {"backward", "grad", "register_hook", "register_post_accumulate_grad_hook", "__set__"}
_READ = "__get__"  # of properties, such as shape: that of data is a tensor, which is written past all this
_META = torch.device("meta")
# Functions that pass the numbers by which they pick a part of a tensor on to operators as they are.
_PICKS = (Tensor.__getitem__, Tensor.select, torch.select)
# Properties that say where a tensor lies.
_PLACE = frozenset({"is_cpu", "is_cuda", "is_meta", "is_mps", "is_xpu", "is_mtia"})


def equal_layers(
    module: nn.Module, run: Callable[[Mapping[str, Tensor]], Any], inputs: Mapping[str, Tensor]
) -> tuple[Layers, ...]:
    """Return the lists of layers of a module without values of each of which a few stand for all, in the order in
    which they run; () where none are sure to: all that are deep, or else the longest.

    ``run`` calls it with tensors in place of ``inputs``, and is called twice for either; meanwhile others are in place
    of the module's.
    """
    every = deep_lists(module)
    longest = sorted(every, key=lambda one: -len(one.repeated))[:1]
    tried = [every, (*longest,)] if len(every) > 1 else [every] * len(every)
    return next(filter(None, (_compared(module, run, inputs, lists) for lists in tried)), ())


def _compared(
    module: nn.Module,
    run: Callable[[Mapping[str, Tensor]], Any],
    inputs: Mapping[str, Tensor],
    lists: Sequence[Layers],
) -> tuple[Layers, ...]:
    """Return these lists where few of their layers stand for all, else nothing."""
    streams: list[_Stream] = []  # both stay, since what they hold is known by its id

    def written(given: Mapping[str, Tensor]) -> Written:
        streams.append(_Stream(module, lists, given, _only_device(inputs)))
        return streams[-1].written(partial(run, given))

    try:
        with _on_meta(module, inputs) as given:
            whole = written(given)
            with shortened(module, lists):
                few = written(given)
        return stood_for(lists, whole, few)
    except Exception:  # noqa: BLE001 - a model that cannot run so is exported as it is
        return ()


@contextlib.contextmanager
def _on_meta(module: nn.Module, inputs: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Let a module hold tensors on the meta device that look like its own; return such ones of its inputs."""
    device, own = _only_device(inputs), _held(module)
    known = {id(one): one for one in (*(value for _, _, value in own), *inputs.values())}
    stand_ins = {name: _stand_in(tensor, device) for name, tensor in known.items()}
    try:
        for held, name, value in own:
            held[name] = stand_ins[id(value)]
        yield {name: stand_ins[id(value)] for name, value in inputs.items()}
    finally:
        for held, name, value in own:
            if held.get(name) is stand_ins[id(value)]:  # else forward has put another there
                held[name] = value


def _held(module: nn.Module) -> list[tuple[dict[str, Any], str, Tensor]]:
    """Return what a module's parts hold of tensors: where, and by which name."""
    return [
        (held, name, value)
        for child in module.modules()
        for held in (child._parameters, child._buffers, vars(child))
        for name, value in held.items()
        if isinstance(value, Tensor)
    ]


def _stand_in(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on the meta device that looks like another, which lies on a device."""
    if tensor.device != device or not tensor.is_leaf or tensor.layout is not torch.strided:
        raise Unclear
    looks = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)
    looks = nn.Parameter(looks, False) if isinstance(tensor, nn.Parameter) else looks
    return looks.requires_grad_(tensor.requires_grad)


def _only_device(inputs: Mapping[str, Tensor]) -> torch.device:
    return next(iter(inputs.values())).device


class _Stream(TorchFunctionMode):
    """Writes down the calls of one run."""

    def __init__(
        self,
        module: nn.Module,
        lists: Sequence[Layers],
        inputs: Mapping[str, Tensor],
        device: torch.device,
    ) -> None:
        super().__init__()
        self.device = device  # that tensors are said to lie on
        # By the module that each begins with: of which list a layer is, and its paths.
        self.starts: dict[int, tuple[int, tuple[str, ...]]] = {}
        self.awaited: list[list[int]] = []
        for number, layers in enumerate(lists):
            held = module.get_submodule(layers.path)._modules
            every = [*layers.kept[:FIRST], *layers.repeated, layers.kept[-1]]
            here = {id(held[one[0]]): (number, layers.of(one)) for one in every if one[0] in held}
            self.starts |= here
            self.awaited.append([*here])
        self.own: tuple[str, ...] = ()
        named = {**dict(module.named_parameters()), **dict(module.named_buffers()), **inputs}
        self.names = {id(tensor): name for name, tensor in named.items()}
        self.paths = {id(one): path for path, one in module.named_modules()}
        self.alive: list[Any] = list(named.values())  # so that no other object gets the id of one
        # In which part a tensor was made, by which of its calls, as which of the results.
        self.made: dict[int, tuple[int, int, int]] = {}
        self.parts = [Part(0)]
        self.begun: dict[int, int] = {}  # by list, its first part
        self.list = -1  # whose layers run
        self.growth: dict[int, list[int]] = {}  # by list, of numbers from one layer to the next
        self.given: Any = None  # to the function that is called
        self.numbers: list[int] | None = None  # of the call that is noted, where these may count on

    def written(self, run: Callable[[], Any]) -> Written:
        """Run, and return the calls before the first layer, and of each until the next begins, of the last of a list
        until that of another does, or the end."""
        hook = nn.modules.module.register_module_forward_pre_hook(self._begin)

        def noted(cls: Any, *args: Any, **kwargs: Any) -> Any:
            self._note(cls, (args, kwargs))  # torch asks nobody before it
            return run_function(cls, *args, **kwargs)

        try:
            with _META, self, _Beneath(self), applied(noted):
                result = run()
        finally:
            hook.remove()
        if any(self.awaited):
            raise Unclear
        self._note("result", (result,))
        stops = [*self.begun.values(), len(self.parts)][1:]
        parts = [self.parts[slice(*ends)] for ends in zip(self.begun.values(), stops, strict=True)]
        return Written(self.parts[0], dict(zip(self.begun, parts, strict=True)), growth=self.growth)

    def _begin(self, module: nn.Module, _: Any) -> None:
        """Begin a layer. Those of a list are called once, in their order; all but the first and the last have equal
        calls."""
        if id(module) in self.starts:
            number, own = self.starts[id(module)]
            if number == self.list:
                self._check_alike()
            elif self.list >= 0 and self.awaited[self.list]:
                raise Unclear
            waiting = self.awaited[number]
            if not waiting or waiting.pop(0) != id(module):
                raise Unclear
            self.begun.setdefault(number, len(self.parts))
            self.list, self.own = number, own
            self.parts.append(Part(-1 if waiting else len(self.begun)))
        self._note("module", self._placed(self.paths.get(id(module), "")))

    def _check_alike(self) -> None:
        """Check that a layer that ends is called as the one before, neither being the first."""
        if len(self.parts) - self.begun[self.list] < FIRST:
            return
        before, last = self.parts[-2:]
        if before.calls != last.calls:
            raise Unclear
        grown = [b - a for a, b in zip(before.counted(), last.counted(), strict=True)]
        if self.growth.setdefault(self.list, grown) != grown:
            raise Unclear

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Note a call and what it makes."""
        del types
        name = getattr(func, "__name__", "")
        if name in _ACTS or (name.endswith("_") and not name.endswith("__")):
            raise Unclear
        kwargs = kwargs or {}
        self._note(func, (args, kwargs), picks=func in _PICKS)
        if name == _READ and (told := self._told(func)) is not None:
            return told
        args, kwargs = self._moved(args, kwargs, name)
        given, self.given = self.given, (args, kwargs)
        try:
            result = func(*args, **kwargs)
        finally:
            self.given = given
        for place, tensor in enumerate(_tensors(result)):
            if name == _READ:
                raise Unclear
            self.alive.append(tensor)
            if id(tensor) not in self.names:
                call = len(self.parts[-1].calls)
                self.made.setdefault(id(tensor), (len(self.parts) - 1, call, place))
        return result

    def _told(self, func: Any) -> torch.device | bool | None:
        """Return what a property says of where tensors are said to lie, None where it is of something else."""
        asked = getattr(getattr(func, "__self__", None), "__name__", "")
        if asked == "device":
            return self.device
        return asked == f"is_{self.device.type}" if asked in _PLACE else None

    def _moved(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], name: str
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a function with the meta device in place of that on which tensors are said to lie."""

        def moved(value: Any, name: str) -> Any:
            names_one = isinstance(value, str) and name in ("device", "to")
            is_place = names_one or isinstance(value, torch.device)
            return _META if is_place and torch.device(value).type == self.device.type else value

        return tuple([moved(one, name) for one in args]), {
            key: moved(one, key) for key, one in kwargs.items()
        }

    def _note(self, func: Any, arguments: Any, *, picks: bool = False) -> None:
        state = (
            torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(),
            torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"),
        )  # fmt: skip
        self.numbers = list[int]() if picks else None
        said = self._said(arguments)
        self.parts[-1].calls.append((func, state, said))
        self.parts[-1].numbers.append(self.numbers or [])

    def _said(self, value: Any) -> Any:
        """Write an argument so that it is equal to another only where both mean the same, but for numbers that
        are taken down beside."""
        if isinstance(value, Tensor):
            return self._called(value)
        if isinstance(value, float):
            return "float", value.hex()
        if isinstance(value, _PLAIN):
            return self._plain(value)
        if type(value) is slice:
            return "slice", self._said((value.start, value.stop, value.step))
        if type(value) in (tuple, list, torch.Size):
            return type(value), [self._said(item) for item in value]
        if type(value) is dict:
            return dict, [(self._said(key), self._said(item)) for key, item in value.items()]
        self.alive.append(value)
        return "object", id(value)

    def _plain(self, value: Any) -> Any:
        if self.numbers is None or type(value) is not int:
            return type(value), value
        self.numbers.append(value)
        return int

    def _called(self, tensor: Tensor) -> Any:
        """Write a tensor by where it comes from, and how it looks."""
        looks = tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad
        return self._source(tensor), looks

    def _placed(self, path: str) -> Any:
        """Write a path, in a layer from there."""
        return place_in(self.own, path) or path

    def _source(self, tensor: Tensor) -> Any:
        if id(tensor) in self.names:
            return self._placed(self.names[id(tensor)])
        if id(tensor) not in self.made:
            self.alive.append(tensor)
            return "outside", id(tensor)
        part, call, place = self.made[id(tensor)]
        back = len(self.parts) - 1 - part
        if self.list >= 0 and part >= self.begun[self.list] and back <= 1:
            return back, call, place
        if self.parts[part].behind < 0:
            raise Unclear  # what skips a layer
        return ("behind", self.parts[part].behind), call, place


class _Beneath(TorchDispatchMode):
    """Watches what functions do, and what is done past them. What operators make is known by how their arguments look:
    the kernels of the meta device are slow, being written in Python."""

    def __init__(self, stream: _Stream) -> None:
        super().__init__()
        self.stream = stream
        self.made: dict[Any, Any] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Refuse what writes, and what no function asked for."""
        del types
        given = self.stream.given
        if given is None:
            raise Unclear
        if func._schema.is_mutable:  # what a function made itself, such as a mask, it may write
            known = {*map(memory_of, _tensors(given))}
            if not known.isdisjoint(map(memory_of, written_by(func, args, kwargs or {}))):
                raise Unclear
        return self._answer(func, args, kwargs or {})

    def _answer(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return what an operator makes: memory of its own, where that can be said before."""
        try:
            key = func, _looks(args), _looks((*kwargs.items(),))
            known = self.made.get(key)
        except TypeError:  # something that cannot be compared
            return func(*args, **kwargs)
        if known is not None:
            again = [
                torch.empty_strided(*looks, dtype=dtype, device=_META) for *looks, dtype in known
            ]
            return again[0] if len(func._schema.returns) == 1 else tuple(again)
        result = func(*args, **kwargs)
        if _makes_memory(func) and _tensors_in(args):
            results = [*_tensors(result)]
            if len(results) == len(func._schema.returns):
                self.made[key] = [(one.shape, one.stride(), one.dtype) for one in results]
        return result


def _makes_memory(func: Any) -> bool:
    """Whether an operator makes tensors in memory of their own, and nothing else."""
    returns = func._schema.returns
    is_plain = func.namespace == "aten" and not func._schema.is_mutable
    return is_plain and all(not one.alias_info and str(one.type) == "Tensor" for one in returns)


def _looks(value: Any) -> Any:
    """Write an argument by all of it that says how a result looks."""
    if isinstance(value, Tensor):
        if value.is_complex() or value.device != _META:
            raise TypeError
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (tuple, list)):
        return tuple([_looks(item) for item in value])
    return type(value), value


def _tensors_in(value: Any) -> bool:
    return next(_tensors(value), None) is not None


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors([*value.values()])
