"""Replace the modules that cannot be exported, or the tails of their forwards, by opaque operators."""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from shardwright.runtime.capture.counting import Work
from shardwright.runtime.capture.hooks import Opaque, Stub, keep_stub, stub_keys
from shardwright.runtime.capture.keeping import PLAIN
from shardwright.runtime.capture.observe import Observation, Site, called, is_inside, tensors_of
from shardwright.runtime.capture.prepare import LossOnly
from shardwright.runtime.capture.record import Slot
from shardwright.runtime.capture.rowwise import Given, are_twins, rows_of
from shardwright.runtime.capture.tails import Tail, calls_before_failure, find_tail, first_results

Attempt = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]


def opaque_modules(
    twin: nn.Module, seen: Observation, attempt: Attempt
) -> Iterator[tuple[str, ...]]:
    """Yield with more and more of ``twin`` replaced by opaque operators, smallest culprits first.

    First those alone that an observed run says must stay whole, then also those that cannot be
    captured: ``attempt`` raises where a module with given arguments cannot be. Of these only the rest
    behind their first calls of submodules where that is possible. Replacements are undone when the
    generator goes on. Yields the paths; ends before the whole model would be opaque.
    """
    yield from _marked(twin, seen)
    if "" in seen.whole:
        return
    culprits = _culprits(twin, "", seen.sites, attempt)
    paths = _outermost({*seen.whole, *culprits} - {""})
    yield from _cut(twin, paths, culprits, seen, attempt)
    while paths:
        with _replaced(twin, sorted(paths), seen) as is_done:
            if is_done:
                yield tuple(sorted(paths))
        parents = {called(path.rpartition(".")[0], seen.sites) for path in paths}
        if "" in parents:
            return
        paths = _outermost(parents)


def _marked(twin: nn.Module, seen: Observation) -> Iterator[tuple[str, ...]]:
    """Yield with those replaced that must stay whole: first so that those are written out which only take
    gradients."""
    paths = tuple(sorted(seen.whole))
    if seen.inner and not seen.switches:
        with _replaced(twin, paths, seen, inner=seen.inner) as is_done:
            if is_done:
                yield paths
    if paths and "" not in seen.whole:
        with _replaced(twin, paths, seen) as is_done:
            if is_done:
                yield paths


def _cut(
    twin: nn.Module, paths: set[str], culprits: list[str], seen: Observation, attempt: Attempt
) -> Iterator[tuple[str, ...]]:
    """Yield with culprits, or their tails, replaced; then with the model's own tail, too."""
    tails = {path: _tail(twin, path, seen, attempt) for path in culprits}
    cut = sorted(paths | {path for path, tail in tails.items() if tail is not None})
    if not cut:
        return
    with _replaced(twin, cut, seen, tails) as is_done:
        if not is_done:
            return
        yield tuple(cut)
        tail = None if "" in cut else _tail(twin, "", seen, attempt)
        if tail is not None:
            with _replaced(twin, [""], seen, {"": tail}) as is_done:
                if is_done:
                    yield "", *cut


def _tail(twin: nn.Module, path: str, seen: Observation, attempt: Attempt) -> Tail | None:
    """Return what may be cut off a module's forward, with which the module can be captured."""
    if seen.real is None or not _may_be_cut(path, seen):
        return None
    child, site = twin.get_submodule(path), seen.sites[path]

    def run() -> None:
        attempt(child, *_fake_arguments(child, site))

    def succeeds(tail: Tail) -> bool:
        with _replaced(twin, [path], seen, {path: tail}) as is_done, contextlib.suppress(Exception):
            run()
            return is_done
        return False

    return find_tail(seen.real, path, partial(calls_before_failure, child, run), succeeds)


def _may_be_cut(path: str, seen: Observation) -> bool:
    """Whether a module was called once, holds nothing that must stay whole, and is not split by rows."""
    site = seen.sites.get(path)
    if seen.switches or site is None or len(site.arguments) > 1:
        return False
    marked = {*seen.whole, *seen.keeps, *seen.differentiates}
    return not any(is_inside(one, path) for one in marked) and not _kept_and_rows(path, seen)[1]


def _fake_arguments(child: nn.Module, site: Site) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what a module was called with at first, without values."""
    own = next(iter((*child.parameters(), *child.buffers())), None)
    mode = getattr(own, "fake_mode", None) or FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        return pytree.tree_map_only(
            Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype), site.arguments[0]
        )


def _outermost(paths: set[str]) -> set[str]:
    return {p for p in paths if not any(p != q and is_inside(p, q) for q in paths)}


@contextlib.contextmanager
def _replaced(
    twin: nn.Module,
    paths: Sequence[str],
    seen: Observation,
    tails: Mapping[str, Tail | None] | None = None,
    inner: frozenset[str] = frozenset(),
) -> Iterator[bool]:
    """Let modules, or only their tails, be opaque for a while, those of ``inner`` until they are written out;
    yields whether all of them can be."""
    with stub_keys() as keys:
        try:
            keys += [
                _replace(twin, path, seen, (tails or {}).get(path), path in inner) for path in paths
            ]
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
    try:
        attempt(child, *_fake_arguments(child, sites[path]))
    except Exception:  # noqa: BLE001 - any reason makes it a suspect
        return _culprits(twin, path, sites, attempt)
    return []


def _replace(
    twin: nn.Module, path: str, seen: Observation, tail: Tail | None, is_inner: bool
) -> str:
    """Let a module's forward call the opaque operator; returns its key, "" when it cannot."""
    child, site = twin.get_submodule(path), seen.sites[path]
    if not tensors_of(site.arguments[0]) or not _can_be_returned(path, site.results[0]):
        return ""
    call = _call_of(child, path, seen, tail)
    original = child.forward
    inner = original if is_inner else None
    key = keep_stub(Stub(call, partial(_scaled_results, site), inner=inner))

    def forward(*args: Any, **kwargs: Any) -> Any:
        known = first_results(child, original, tail, args, kwargs) if tail else ()
        # Looked up now: while tracing, export has put its own tensors in their place.
        state = [operator.attrgetter(name)(child) for name in call.state]
        tensors = [*tensors_of((args, kwargs, known)), *state]
        results = iter(torch.ops.shardwright.opaque(tensors, key))
        return pytree.tree_map_only(Tensor, lambda _: next(results), site.results[0])

    vars(child)["forward"] = forward
    return key


def _can_be_returned(path: str, result: Any) -> bool:
    """Whether a call gives tensors: what else a part returns may depend on values, of the model only tensors
    are used."""
    leaves = pytree.tree_leaves(result)
    others = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
    is_plain = path == "" and all(isinstance(leaf, PLAIN) for leaf in others)
    return len(leaves) > len(others) and (not others or is_plain)


def _call_of(child: nn.Module, path: str, seen: Observation, tail: Tail | None) -> Opaque:
    """Return the call of a module, or of its tail."""
    site, title = seen.sites[path], type(child).__name__
    numbers = itertools.count()
    arguments = pytree.tree_map_only(Tensor, lambda _: Slot(next(numbers)), site.arguments[0])
    what = f"{f'module {path}' if path else 'the model'} ({title})"
    common: dict[str, Any] = {
        "path": path,
        "module": child,
        "asking": site.asking,
        "overwrites": site.writes,
        "frozen": _frozen(child),
        "differentiates": path in seen.differentiates,
        "switches": seen.switches,
        "rows": site.rows,
        "makes": seen.made_in(path),
        "written": seen.written_in(path),
    }
    if tail is not None:
        return Opaque(
            kind=f"opaque.{title}",
            state=tail.state,
            arguments=(*arguments, *tail.results),
            note=_note(f"{tail.called} {what}", path, seen),
            work=tail.work,
            tail=tail,
            **common,
        )
    keeps, by_row = _kept_and_rows(path, seen)
    return Opaque(
        kind=f"{'rowwise' if by_row else 'opaque'}.{title}",
        state=(*dict(child.named_parameters()), *dict(child.named_buffers())),
        arguments=arguments,
        note=_note(what, path, seen, by_row),
        keeps=keeps,
        by_row=by_row,
        work=site.work[0],
        **common,
    )


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


def _kept_and_rows(path: str, seen: Observation) -> tuple[bool, tuple[int, ...]]:
    """Return whether a module keeps state in Python, and the tensors whose rows stay apart in it."""
    keeps, call = any(is_inside(one, path) for one in seen.keeps), seen.sites[path].call
    if call is None or keeps or path in seen.differentiates:
        return keeps, ()
    return keeps, _rows(seen.sites[path], call, seen)


def _rows(site: Site, call: Given, seen: Observation) -> tuple[int, ...]:
    """Return the tensors of a call whose rows stay apart: asked for once, and of layers that are alike once."""
    if site.by_row is None:
        known = [(one.call, one.by_row) for one in seen.sites.values() if one.by_row is not None]
        found = (rows for other, rows in known if other is not None and are_twins(other, call))
        rows = next(found, None)
        site.by_row = rows_of(call) if rows is None else rows
    return site.by_row


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


def _wrapped(seen: Observation | None) -> frozenset[str]:
    """Return the frozen parameters that forward writes, as a wrapped model names them."""
    return frozenset(f"module.{one}" for one in seen.written) if seen else frozenset()


def _frozen(module: nn.Module) -> frozenset[str]:
    return frozenset(path for path, child in module.named_modules() if not child.training)


def call_whole(
    wrapper: LossOnly,
    state: list[str],
    batch: Mapping[str, Any],
    seen: Observation | None,
    work: Work,
    rows: int,
) -> Opaque:
    """Return the whole wrapped model, with its loss, as one call on the batch, then ``state``.

    ``work`` is what it takes for so many rows of the batch.
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
        overwrites=seen is None or seen.sites[""].writes,
        # What could not be watched may do anything.
        differentiates=seen is None or bool(seen.differentiates),
        keeps=seen is None or bool(seen.keeps),
        switches=seen is None or seen.switches,
        work=work,
        rows=rows,
        makes=frozenset() if seen is None else seen.made_in(""),
        written=_wrapped(seen),
    )
