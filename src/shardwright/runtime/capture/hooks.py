"""Module-level capture for what cannot be exported: opaque operators that call a module.

An opaque operator is a module run as a pure function of its input tensors, parameters and buffers.
It has no rule, so it runs whole wherever it runs; the rest of the model stays in the graph. To know
what goes in and out of a module whose control flow depends on data, the model is run once for real,
on the example batch, with hooks; a model on the meta device is filled with small noise for that.
"""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, library, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from shardwright.errors import CaptureError
from shardwright.runtime.capture.record import Slot, Unsupported

# A real run of a model on the meta device allocates it: not beyond this many elements.
LARGEST_REAL_MODEL = 500_000_000

_operators = library.Library("shardwright", "FRAGMENT")
_operators.define("opaque(Tensor[] tensors, str key) -> Tensor[]")


@dataclass(frozen=True, eq=False)
class Opaque:
    """A module as a pure function. Its tensors are: those in ``arguments``, then its state.

    ``arguments`` is (args, kwargs) with a slot per tensor. ``note`` tells the user about it.
    ``flops`` were counted in its forward when its first tensor had ``rows`` rows (0: no dims).
    """

    kind: str
    module: nn.Module
    state: tuple[str, ...]
    arguments: tuple[Any, ...]
    note: str
    flops: float = 0.0
    rows: int = 0

    def flops_of(self, inputs: Sequence[tuple[int, ...]]) -> float:
        """Return the flops of a forward on tensors of these shapes, as many per row."""
        first = inputs[0] if inputs else ()
        return self.flops * first[0] / self.rows if first and self.rows else self.flops

    def __call__(
        self, tensors: list[Tensor], training: bool = True, writes: bool = True
    ) -> Tensor | list[Tensor]:
        """Run the module on tensors; buffers among its state are updated in place if it ``writes``."""
        split = len(tensors) - len(self.state)
        tensors = [_DenseGradient.apply(t) if t.requires_grad else t for t in tensors]
        args, kwargs = pytree.tree_map_only(Slot, lambda slot: tensors[slot.index], self.arguments)
        state = dict(zip(self.state, tensors[split:], strict=True))
        if not writes:
            for name, _ in self.module.named_buffers():
                state[name] = state[name].clone()
        if self.module.training != training:
            self.module.train(training)
        result = torch.func.functional_call(self.module, state, tuple(args), kwargs)
        leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        return leaves[0] if len(leaves) == 1 else leaves


class _DenseGradient(torch.autograd.Function):
    """Lets a module's sparse gradient arrive dense, as all that adds and sends gradients needs it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.to_dense() if gradient.is_sparse else gradient


@dataclass
class Site:
    """What was seen of one module in the real run: arguments, results and flops of each call."""

    arguments: list[Any] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    flops: list[float] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """The rows of the first tensor among the arguments of the first call."""
        seen = _tensors(self.arguments[0])
        return seen[0].shape[0] if seen and seen[0].dim() else 0


@dataclass(frozen=True)
class _Stub:
    """What the custom operator does while tracing: the call, and results by input shapes."""

    call: Opaque
    site: Site


_stubs: dict[str, _Stub] = {}  # alive only while ``opaque_modules`` is suspended at a yield
_keys = itertools.count()


@library.register_fake("shardwright::opaque", lib=_operators)
def _fake_results(tensors: list[Tensor], key: str) -> list[Tensor]:
    return _results(_stubs[key], tensors)


def opaque_call(key: str, tensors: list[Tensor]) -> tuple[Opaque, list[Tensor]]:
    """Return the call behind a traced opaque operator and its results on meta tensors."""
    stub = _stubs[key]
    needs_gradient = any(tensor.requires_grad for tensor in tensors)
    results = [
        result.requires_grad_(needs_gradient and result.is_floating_point())
        for result in _results(stub, tensors)
    ]
    return stub.call, results


def _results(stub: _Stub, tensors: list[Tensor]) -> list[Tensor]:
    """Make empty results of the shapes seen, dim 0 scaled as that of the first input is."""
    seen = _tensors(stub.site.arguments[0])
    scale = 1.0
    if seen and seen[0].dim() and tensors[0].dim():
        scale = tensors[0].shape[0] / max(seen[0].shape[0], 1)
    made: list[Tensor] = []
    for result in _tensors(stub.site.results[0]):
        shape = list(result.shape)
        if shape and scale != 1.0 and result.shape[0] * scale == int(result.shape[0] * scale):
            shape[0] = int(result.shape[0] * scale)
        made.append(torch.empty(shape, dtype=result.dtype, device=tensors[0].device))
    return made


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


# -- the real run ------------------------------------------------------------------------------------


def real_copy(module: nn.Module) -> nn.Module:
    """Return a copy on the CPU with storage: the module's own values, or small noise for meta."""
    if sum(parameter.numel() for parameter in module.parameters()) > LARGEST_REAL_MODEL:
        raise Unsupported("the model is too large to be run once on this machine")
    twin = copy.deepcopy(module)
    if not any(tensor.is_meta for tensor in (*twin.parameters(), *twin.buffers())):
        return twin.cpu()
    twin = twin.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*twin.parameters(), *twin.buffers()):
            tensor.normal_(0, 0.02) if tensor.is_floating_point() else tensor.zero_()
    return twin


def observe(module: nn.Module, batch: Mapping[str, Any]) -> tuple[dict[str, Site], Any]:
    """Run the model once for real. Returns what each submodule got and gave, and the output."""
    twin = real_copy(module).train()
    sites: dict[str, Site] = {}
    counter = FlopCounterMode(display=False)
    begun: dict[str, float] = {}
    for path, child in twin.named_modules():

        def note(*_: Any, path: str = path) -> None:
            begun[path] = counter.get_total_flops()

        def keep(_: Any, args: Any, kwargs: Any, result: Any, path: str = path) -> None:
            site = sites.setdefault(path, Site())
            site.arguments.append(pytree.tree_map_only(Tensor, _like, (args, kwargs)))
            site.results.append(pytree.tree_map_only(Tensor, _like, result))
            site.flops.append(counter.get_total_flops() - begun[path])

        child.register_forward_pre_hook(note)
        child.register_forward_hook(keep, with_kwargs=True)
    real = {
        name: torch.zeros(value.shape, dtype=value.dtype)
        if isinstance(value, Tensor) and value.is_meta
        else value.cpu()
        if isinstance(value, Tensor)
        else value
        for name, value in batch.items()
    }
    with torch.random.fork_rng(), counter:
        try:
            output = twin(**real)
        except Exception as error:
            raise CaptureError(
                f"a model must run on its example batch, but {type(module).__name__} failed with "
                f"{type(error).__name__}: {error}; check the model and the batch's shapes and dtypes"
            ) from error
    return sites, output


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta", requires_grad=False)


# -- making modules opaque -----------------------------------------------------------------------------

Attempt = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]


def opaque_modules(
    module: nn.Module, twin: nn.Module, batch: Mapping[str, Any], attempt: Attempt
) -> Iterator[tuple[str, ...]]:
    """Yield with more and more of ``twin`` replaced by opaque operators, smallest culprits first.

    ``attempt`` raises where a module with given arguments cannot be captured. Replacements are
    undone when the generator goes on. Yields the paths; ends before the whole model would be opaque.
    """
    try:
        sites, _ = observe(module, batch)
    except Unsupported:
        return
    paths = set(_culprits(twin, "", sites, attempt)) - {""}
    while paths:
        keys = [_replace(twin, path, sites[path]) for path in sorted(paths)]
        try:
            if all(keys):
                yield tuple(sorted(paths))
        finally:
            for path in paths:
                vars(twin.get_submodule(path)).pop("forward", None)
            for key in keys:
                _stubs.pop(key, None)
        parents = {path.rpartition(".")[0] for path in paths}
        parents = {path if path in sites else path.rpartition(".")[0] for path in parents}
        if "" in parents:
            return
        paths = {p for p in parents if not any(p.startswith(f"{q}.") for q in parents)}


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


def _replace(twin: nn.Module, path: str, site: Site) -> str:
    """Let a module's forward call the opaque operator; returns its key, "" when it cannot."""
    child = twin.get_submodule(path)
    leaves, spec = pytree.tree_flatten(site.results[0])
    if not leaves or not all(isinstance(leaf, Tensor) for leaf in leaves):
        return ""
    numbers = itertools.count()
    arguments = pytree.tree_map_only(Tensor, lambda _: Slot(next(numbers)), site.arguments[0])
    state = (*dict(child.named_parameters()), *dict(child.named_buffers()))
    if next(numbers) == 0:
        return ""
    call = Opaque(
        kind=f"opaque.{type(child).__name__}",
        module=child,
        state=state,
        arguments=arguments,
        note=f"module {path} ({type(child).__name__}) is one opaque operator and runs replicated",
        flops=site.flops[0],
        rows=site.rows,
    )
    key = f"{path}#{next(_keys)}"
    _stubs[key] = _Stub(call, site)

    def forward(*args: Any, **kwargs: Any) -> Any:
        # Looked up now: while tracing, export has put its own tensors in their place.
        state = [operator.attrgetter(name)(child) for name in call.state]
        tensors = [*_tensors((args, kwargs)), *state]
        return pytree.tree_unflatten(torch.ops.shardwright.opaque(tensors, key), spec)

    vars(child)["forward"] = forward
    return key


def call_whole(
    wrapper: nn.Module,
    state: list[str],
    batch_names: tuple[str, ...],
    title: str,
    work: tuple[float, int] = (0.0, 0),
) -> Opaque:
    """Return the whole wrapped model, with its loss, as one call on the batch, then ``state``.

    ``work`` is its flops, and for how many rows of the batch.
    """
    arguments = ((), {name: Slot(index) for index, name in enumerate(batch_names)})
    return Opaque(
        kind=f"opaque.{title}",
        module=wrapper,
        state=tuple(state),
        arguments=arguments,
        note=f"the whole model ({title}) is one opaque operator and runs replicated",
        flops=work[0],
        rows=work[1],
    )
