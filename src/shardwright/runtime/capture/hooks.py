"""Module-level capture for what cannot be exported: opaque operators that call a module.

An opaque operator is a module run as a pure function of its input tensors, parameters and buffers.
It is split by rows where ``rowwise`` has seen that it computes each by itself, else it has no rule and
runs whole wherever it runs; the rest of the model stays in the graph. To know
what goes in and out of a module whose control flow depends on data, the model is run once for real,
on the example batch, with hooks; a model on the meta device is filled with small noise for that.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, library, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils import _pytree as pytree

from shardwright.runtime.capture.counting import NOTHING, Work
from shardwright.runtime.capture.keeping import State, put_state, take_state
from shardwright.runtime.capture.prepare import LossOnly
from shardwright.runtime.capture.recomputing import checkpoints
from shardwright.runtime.capture.record import Slot
from shardwright.runtime.capture.switching import switched
from shardwright.runtime.capture.tails import Tail, answered

_operators = library.Library("shardwright", "FRAGMENT")
_operators.define("opaque(Tensor[] tensors, str key) -> Tensor[]")


@dataclass(frozen=True, eq=False, kw_only=True)
class Opaque:
    """A module as a pure function. Its tensors are: those in ``arguments``, then its state.

    ``path`` is the module's in the model, None for a function of its own; a whole model is wrapped. ``arguments`` is (args, kwargs)
    with a slot per tensor, those in ``asking`` are differentiated by; where it ``overwrites`` them it is given copies. ``note`` tells the user about
    it. ``frozen`` are the submodules in evaluation mode. ``differentiates``: gradients are taken
    inside. ``keeps``: a call changes what it holds in Python, ``switches``: it may switch
    ``requires_grad`` of parameters. ``work`` was counted in its forward
    when its first tensor had ``rows`` rows (0: no dims). ``by_row``: the places of the tensors whose
    rows, their first dim, are computed each by itself. ``written``: the frozen parameters that it writes. ``makes``: the dtypes of what it makes inside. ``tail``: only what
    forward does behind some calls of submodules is run, whose results are ``arguments`` too.
    ``saves``: which of its tensors, and behind them of its results, its backward needs, where that is known.
    """

    kind: str
    path: str | None
    module: nn.Module
    state: tuple[str, ...]
    arguments: tuple[Any, ...]
    note: str
    asking: frozenset[int] = frozenset()
    overwrites: bool = False
    frozen: frozenset[str] = frozenset()
    differentiates: bool = False
    keeps: bool = False
    switches: bool = False
    work: Work = NOTHING
    rows: int = 0
    by_row: tuple[int, ...] = ()
    written: frozenset[str] = frozenset()
    makes: frozenset[torch.dtype] = frozenset()
    tail: Tail | None = None
    saves: tuple[int, ...] | None = None
    _last: list[State] = field(default_factory=list[State])

    @property
    def attributes(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """What the operator says of itself besides the call's arguments."""
        rows = (("rows", self.by_row),) if self.by_row else ()
        return rows if self.saves is None else (*rows, ("saves", self.saves))

    def of(self, model: nn.Module) -> Opaque:
        """Return the same call of a model's own module, which keeps its own state."""
        if self.path is None:
            return self
        if isinstance(self.module, LossOnly):
            old = self.module
            own: nn.Module = LossOnly(model, old.names.values(), old.constants, old.outputs)
        else:
            own = model.get_submodule(self.path)
        return replace(self, module=own, _last=[])

    def work_of(self, inputs: Sequence[tuple[int, ...]]) -> Work:
        """Return the work of a forward on tensors of these shapes, as much per row."""
        first = inputs[0] if inputs else ()
        share = first[0] / self.rows if first and self.rows else 1.0
        return Work(self.work.flops * share, round(self.work.kept * share))

    def __call__(
        self, tensors: list[Tensor], training: bool = True, writes: bool = True
    ) -> Tensor | list[Tensor]:
        """Run the module on tensors; buffers among its state are updated in place if it ``writes``.

        A run in training that does not write repeats the last one that did, from what the module
        kept in Python before it; one in evaluation leaves no trace.
        """
        split = len(tensors) - len(self.state)
        given = [self._given(place, tensor) for place, tensor in enumerate(tensors[:split])]
        args, kwargs, *answers = pytree.tree_map_only(
            Slot, lambda slot: given[slot.index], self.arguments
        )
        held = dict(zip(self.state, tensors[split:], strict=True))
        buffers = {name for name, _ in self.module.named_buffers()} | self.written
        state = {
            name: _passed(tensor, writes) if name in buffers else tensor
            for name, tensor in held.items()
        }
        grad = torch.enable_grad() if self.differentiates else contextlib.nullcontext()
        again = partial(_reparametrize_module, self.module, state)
        flags = switched(self.module) if self.switches else contextlib.nullcontext()
        inner = checkpoints(again)
        if self.tail is not None:
            inner = answered(self.module, self.tail.paths, answers)
            device = tensors[0].device
            state |= {name: self._nowhere(name, device) for name in self.tail.absent}
        with grad, self._mode(training), self._memory(training, writes), inner, flags:
            result = torch.func.functional_call(self.module, state, tuple(args), kwargs)
        if writes:
            # A buffer may have been given another tensor, or other memory, instead of being written into.
            for name in buffers & held.keys():
                if _is_other(state[name], held[name]):
                    with torch.no_grad():
                        held[name].copy_(state[name].clone())  # it may be a view of the same memory
        leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        return leaves[0] if len(leaves) == 1 else leaves

    def _nowhere(self, name: str, device: torch.device) -> Tensor:
        """Return a tensor without values that says where it would be: whoever uses one that was not handed in must fail."""
        own = operator.attrgetter(name)(self.module)
        looks = torch.empty_like(own, device="meta", requires_grad=False)
        return FakeTensor(FakeTensorMode(), looks, device)

    def _given(self, place: int, tensor: Tensor) -> Tensor:
        """Return an argument that may be asked for gradients without a trace outside."""
        if self.overwrites:  # others read it again: recomputation, microbatches, ranks beside
            tensor = tensor.clone()
        if tensor.requires_grad:
            return tensor
        return tensor.detach().requires_grad_(place in self.asking)

    @contextlib.contextmanager
    def _mode(self, training: bool) -> Iterator[None]:
        before = [(child, child.training) for child in self.module.modules()]
        for path, child in self.module.named_modules():
            child.training = training and path not in self.frozen
        try:
            yield
        finally:
            for child, mode in before:
                child.training = mode

    @contextlib.contextmanager
    def _memory(self, training: bool, writes: bool) -> Iterator[None]:
        if not self.keeps:
            yield
            return
        now = take_state(self.module)
        if writes:
            self._last[:] = [now]
            yield
            return
        if training and self._last:
            put_state(self.module, self._last[0])
        try:
            yield
        finally:
            put_state(self.module, now)


def _passed(buffer: Tensor, writes: bool) -> Tensor:
    """Return a buffer, or a copy, that may be given other memory (``.data = ...``) and lets ours be. Not detached: what
    is written into ours afterwards would count as written into what backward reads."""
    return buffer.data if writes else buffer.clone()


def _is_other(now: Tensor, before: Tensor) -> bool:
    return (now.data_ptr(), now.shape, now.stride()) != (
        before.data_ptr(), before.shape, before.stride(),
    )  # fmt: skip


@dataclass(frozen=True)
class Stub:
    """What the custom operator does while tracing: the call, its results for given inputs, and at
    which places results have no gradient. ``inner``: the forward of a module that takes gradients in it, which
    is to be written out as operators."""

    call: Opaque
    results: Callable[[list[Tensor]], list[Tensor]]
    without_gradient: frozenset[int] = frozenset()
    inner: Callable[..., Any] | None = None


_stubs: dict[str, Stub] = {}  # alive only while a trace is
_keys = itertools.count()


@contextlib.contextmanager
def stub_keys() -> Iterator[list[str]]:
    """Yield a list for keys of stubs, which are forgotten in the end."""
    keys: list[str] = []
    try:
        yield keys
    finally:
        for key in keys:
            _stubs.pop(key, None)


def keep_stub(stub: Stub) -> str:
    """Return a key by which tracing finds a stub."""
    key = f"{stub.call.kind}#{next(_keys)}"
    _stubs[key] = stub
    return key


def inner_stub(key: str) -> Stub | None:
    """Return the stub of a traced opaque operator that is to be written out, None of another."""
    return _stubs[key] if _stubs[key].inner else None


@library.register_fake("shardwright::opaque", lib=_operators)
def _fake_results(tensors: list[Tensor], key: str) -> list[Tensor]:
    return _stubs[key].results(tensors)


def opaque_call(key: str, tensors: list[Tensor]) -> tuple[Opaque, list[Tensor]]:
    """Return the call behind a traced opaque operator and its results on meta tensors."""
    stub = _stubs[key]
    needs_gradient = any(tensor.requires_grad for tensor in tensors) and torch.is_grad_enabled()
    results = stub.results(tensors)
    for place, result in enumerate(results):
        has_gradient = result.is_floating_point() and place not in stub.without_gradient
        result.requires_grad_(needs_gradient and has_gradient)
    return stub.call, results
