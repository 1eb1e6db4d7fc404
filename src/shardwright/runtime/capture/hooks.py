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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, library, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils import _pytree as pytree
from torch.utils import checkpoint

from shardwright.runtime.capture.keeping import State, put_state, take_state
from shardwright.runtime.capture.observe import Observation, Site, called, is_inside, tensors_of
from shardwright.runtime.capture.prepare import LossOnly
from shardwright.runtime.capture.record import Slot
from shardwright.runtime.capture.rowwise import rows_of
from shardwright.runtime.capture.switching import switched

_operators = library.Library("shardwright", "FRAGMENT")
_operators.define("opaque(Tensor[] tensors, str key) -> Tensor[]")


@dataclass(frozen=True, eq=False, kw_only=True)
class Opaque:
    """A module as a pure function. Its tensors are: those in ``arguments``, then its state.

    ``path`` is the module's in the model, None for a function of its own; a whole model is wrapped. ``arguments`` is (args, kwargs)
    with a slot per tensor, those in ``asking`` are differentiated by. ``note`` tells the user about
    it. ``frozen`` are the submodules in evaluation mode. ``differentiates``: gradients are taken
    inside. ``keeps``: a call changes what it holds in Python, ``switches``: it may switch
    ``requires_grad`` of parameters. ``flops`` were counted in its forward
    when its first tensor had ``rows`` rows (0: no dims). ``by_row``: the places of the tensors whose
    rows, their first dim, are computed each by itself. ``makes``: the dtypes of what it makes inside.
    """

    kind: str
    path: str | None
    module: nn.Module
    state: tuple[str, ...]
    arguments: tuple[Any, ...]
    note: str
    asking: frozenset[int] = frozenset()
    frozen: frozenset[str] = frozenset()
    differentiates: bool = False
    keeps: bool = False
    switches: bool = False
    flops: float = 0.0
    rows: int = 0
    by_row: tuple[int, ...] = ()
    makes: frozenset[torch.dtype] = frozenset()
    _last: list[State] = field(default_factory=list[State])

    @property
    def attributes(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """What the operator says of itself besides the call's arguments."""
        return (("rows", self.by_row),) if self.by_row else ()

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

    def flops_of(self, inputs: Sequence[tuple[int, ...]]) -> float:
        """Return the flops of a forward on tensors of these shapes, as many per row."""
        first = inputs[0] if inputs else ()
        return self.flops * first[0] / self.rows if first and self.rows else self.flops

    def __call__(
        self, tensors: list[Tensor], training: bool = True, writes: bool = True
    ) -> Tensor | list[Tensor]:
        """Run the module on tensors; buffers among its state are updated in place if it ``writes``.

        A run in training that does not write repeats the last one that did, from what the module
        kept in Python before it; one in evaluation leaves no trace.
        """
        split = len(tensors) - len(self.state)
        given = [self._given(place, tensor) for place, tensor in enumerate(tensors[:split])]
        args, kwargs = pytree.tree_map_only(Slot, lambda slot: given[slot.index], self.arguments)
        held = dict(zip(self.state, tensors[split:], strict=True))
        buffers = {name for name, _ in self.module.named_buffers()}
        state = {
            name: tensor.clone() if name in buffers and not writes else tensor
            for name, tensor in held.items()
        }
        grad = torch.enable_grad() if self.differentiates else contextlib.nullcontext()
        again = partial(_reparametrize_module, self.module, state)
        flags = switched(self.module) if self.switches else contextlib.nullcontext()
        with grad, self._mode(training), self._memory(training, writes), checkpoints(again), flags:
            result = torch.func.functional_call(self.module, state, tuple(args), kwargs)
        if writes:  # a buffer may have been given another tensor instead of being written into
            for name in buffers & held.keys():
                if state[name] is not held[name]:
                    with torch.no_grad():
                        held[name].copy_(state[name])
        leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        return leaves[0] if len(leaves) == 1 else leaves

    def _given(self, place: int, tensor: Tensor) -> Tensor:
        """Return an argument that may be asked for gradients without a trace outside."""
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


@contextlib.contextmanager
def checkpoints(again: Callable[[], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
    """Let ``torch.utils.checkpoint`` recompute inside ``again``, where the module has the tensors of
    this call: in backward it has its own, which may be of another step.

    Its reentrant form, which cannot be differentiated by inputs, becomes the other one.
    """
    plain, generator = checkpoint.checkpoint, checkpoint._checkpoint_without_reentrant_generator

    def recomputed(function: Callable[..., Any], *rest: Any, **named: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            with again():
                return function(*args, **kwargs)

        return generator(run, *rest, **named)

    def reentrant(run: Callable[..., Any], preserves: bool, *args: Any) -> Any:
        return plain(run, *args, use_reentrant=False, preserve_rng_state=preserves)

    checkpoint._checkpoint_without_reentrant_generator = recomputed  # type: ignore[assignment]
    checkpoint.CheckpointFunction.apply = reentrant  # type: ignore[method-assign]
    try:
        yield
    finally:
        checkpoint._checkpoint_without_reentrant_generator = generator
        del checkpoint.CheckpointFunction.apply


@dataclass(frozen=True)
class Stub:
    """What the custom operator does while tracing: the call, its results for given inputs, and at
    which places results have no gradient."""

    call: Opaque
    results: Callable[[list[Tensor]], list[Tensor]]
    without_gradient: frozenset[int] = frozenset()


_stubs: dict[str, Stub] = {}  # alive only while ``stand_in`` is
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


def _scaled_results(site: Site, tensors: list[Tensor]) -> list[Tensor]:
    """Make empty results of the shapes seen, dim 0 scaled as that of the first input is."""
    seen = tensors_of(site.arguments[0])
    scale = 1.0
    if seen and seen[0].dim() and tensors[0].dim():
        scale = tensors[0].shape[0] / max(seen[0].shape[0], 1)
    made: list[Tensor] = []
    for result in tensors_of(site.results[0]):
        shape = list(result.shape)
        if shape and scale != 1.0 and result.shape[0] * scale == int(result.shape[0] * scale):
            shape[0] = int(result.shape[0] * scale)
        made.append(torch.empty(shape, dtype=result.dtype, device=tensors[0].device))
    return made


# -- making modules opaque -----------------------------------------------------------------------------

Attempt = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]


def opaque_modules(
    twin: nn.Module, seen: Observation, attempt: Attempt
) -> Iterator[tuple[str, ...]]:
    """Yield with more and more of ``twin`` replaced by opaque operators, smallest culprits first.

    First those alone that an observed run says must stay whole, then also those that cannot be
    captured: ``attempt`` raises where a module with given arguments cannot be. Replacements are
    undone when the generator goes on. Yields the paths; ends before the whole model would be opaque.
    """
    if "" in seen.whole:
        return
    if seen.whole:
        with _replaced(twin, sorted(seen.whole), seen) as is_done:
            if is_done:
                yield tuple(sorted(seen.whole))
    paths = _outermost({*seen.whole, *_culprits(twin, "", seen.sites, attempt)} - {""})
    while paths:
        with _replaced(twin, sorted(paths), seen) as is_done:
            if is_done:
                yield tuple(sorted(paths))
        parents = {called(path.rpartition(".")[0], seen.sites) for path in paths}
        if "" in parents:
            return
        paths = _outermost(parents)


def _outermost(paths: set[str]) -> set[str]:
    return {p for p in paths if not any(p != q and is_inside(p, q) for q in paths)}


@contextlib.contextmanager
def _replaced(twin: nn.Module, paths: Sequence[str], seen: Observation) -> Iterator[bool]:
    """Let modules be opaque for a while; yields whether all of them can be."""
    with stub_keys() as keys:
        try:
            keys += [_replace(twin, path, seen) for path in paths]
            yield all(keys)
        finally:
            for path in paths:
                vars(twin.get_submodule(path)).pop("forward", None)


def _culprits(twin: nn.Module, path: str, sites: Mapping[str, Site], attempt: Attempt) -> list[str]:
    """Return the smallest modules under ``path`` that cannot be captured by themselves."""
    module = twin.get_submodule(path)
    found = [
        culprit
        for name, child in module.named_children()
        for culprit in _suspects(twin, f"{path}.{name}" if path else name, child, sites, attempt)
    ]
    return found or [path]


def _suspects(
    twin: nn.Module, path: str, child: nn.Module, sites: Mapping[str, Site], attempt: Attempt
) -> list[str]:
    if path not in sites:  # a list of modules is never called itself
        return [
            culprit
            for name, inner in child.named_children()
            for culprit in _suspects(twin, f"{path}.{name}", inner, sites, attempt)
        ]
    own = next(iter((*child.parameters(), *child.buffers())), None)
    mode = getattr(own, "fake_mode", None) or FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        args, kwargs = pytree.tree_map_only(
            Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype), sites[path].arguments[0]
        )
    try:
        attempt(child, args, kwargs)
    except Exception:  # noqa: BLE001 - any reason makes it a suspect
        return _culprits(twin, path, sites, attempt)
    return []


def _replace(twin: nn.Module, path: str, seen: Observation) -> str:
    """Let a module's forward call the opaque operator; returns its key, "" when it cannot."""
    child, site = twin.get_submodule(path), seen.sites[path]
    leaves, spec = pytree.tree_flatten(site.results[0])
    if not leaves or not all(isinstance(leaf, Tensor) for leaf in leaves):
        return ""
    numbers = itertools.count()
    arguments = pytree.tree_map_only(Tensor, lambda _: Slot(next(numbers)), site.arguments[0])
    if next(numbers) == 0:
        return ""
    keeps, by_row = _kept_and_rows(path, seen)
    call = Opaque(
        kind=f"{'rowwise' if by_row else 'opaque'}.{type(child).__name__}",
        path=path,
        module=child,
        state=(*dict(child.named_parameters()), *dict(child.named_buffers())),
        arguments=arguments,
        note=_note(f"module {path} ({type(child).__name__})", path, seen, by_row),
        asking=site.asking,
        frozen=_frozen(child),
        differentiates=path in seen.differentiates,
        keeps=keeps,
        switches=seen.switches,
        by_row=by_row,
        flops=site.flops[0],
        rows=site.rows,
        makes=seen.made_in(path),
    )
    key = keep_stub(Stub(call, partial(_scaled_results, site)))

    def forward(*args: Any, **kwargs: Any) -> Any:
        # Looked up now: while tracing, export has put its own tensors in their place.
        state = [operator.attrgetter(name)(child) for name in call.state]
        tensors = [*tensors_of((args, kwargs)), *state]
        return pytree.tree_unflatten(torch.ops.shardwright.opaque(tensors, key), spec)

    vars(child)["forward"] = forward
    return key


def _kept_and_rows(path: str, seen: Observation) -> tuple[bool, tuple[int, ...]]:
    """Return whether a module keeps state in Python, and the tensors whose rows stay apart in it."""
    keeps, call = any(is_inside(one, path) for one in seen.keeps), seen.sites[path].call
    is_plain = not keeps and path not in seen.differentiates
    return keeps, rows_of(call) if call is not None and is_plain else ()


def _note(what: str, path: str, seen: Observation | None, by_row: Sequence[int] = ()) -> str:
    """Say that something is opaque, and why where a run has shown it."""
    if by_row:
        return (
            f"{what} is one opaque operator, split over rows only: it was seen to compute each by "
            "itself, in pieces as whole"
        )
    reasons = {} if seen is None else seen.whole
    why = [reason for one, reason in reasons.items() if is_inside(one, path)]
    return f"{what} is one opaque operator and runs replicated" + "".join(
        f": {reason}" for reason in dict.fromkeys(why)
    )


def _frozen(module: nn.Module) -> frozenset[str]:
    return frozenset(path for path, child in module.named_modules() if not child.training)


def call_whole(
    wrapper: LossOnly,
    state: list[str],
    batch: Mapping[str, Any],
    seen: Observation | None,
    work: tuple[float, int],
) -> Opaque:
    """Return the whole wrapped model, with its loss, as one call on the batch, then ``state``.

    ``work`` is its flops, and for how many rows of the batch.
    """
    arguments = ((), {name: Slot(index) for index, name in enumerate(wrapper.names)})
    title = type(wrapper.module).__name__
    given = [batch[name] for name in wrapper.names.values()]
    return Opaque(
        kind=f"opaque.{title}",
        path="",
        module=wrapper,
        state=tuple(state),
        arguments=arguments,
        note=_note(f"the whole model ({title})", "", seen),
        asking=frozenset(place for place, one in enumerate(given) if one.requires_grad),
        frozen=_frozen(wrapper),
        # What could not be watched may do anything.
        differentiates=seen is None or bool(seen.differentiates),
        keeps=seen is None or bool(seen.keeps),
        switches=seen is None or seen.switches,
        flops=work[0],
        rows=work[1],
        makes=frozenset() if seen is None else seen.made_in(""),
    )
