"""Whether a module that stays whole computes every row of its tensors by itself.

Then its rows may be split like samples: over devices and into microbatches. Two witnesses must agree, on
given, drawn and one-sided rows (all alike, so that one expert gets everything):

* the owners of every element of the results, followed through a run in which every branch that depends
  on other rows is taken (``owners``), with the results of a run with which nobody interferes;
* the module run on pieces of the rows, forward and backward, against all rows at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.func import functional_call
from torch.utils import _pytree as pytree

from shardwright.runtime.capture.following import Following, Seen
from shardwright.runtime.capture.keeping import PLAIN, Fingerprint, changes, fingerprint
from shardwright.runtime.capture.owners import FREE, Answers, NotRows, Owners
from shardwright.runtime.engine import run_backward
from shardwright.runtime.randomness import WithoutDropout

MOST_ELEMENTS = 1 << 24  # of arguments: larger ones are not tried
MOST_LINES = 4  # that ask whether any row, or none, is there


Change = Callable[[Tensor], Tensor]  # a result's gradient, made of the result


@dataclass(frozen=True)
class Given:
    """One call of a module: its tensors, and how they are nested. ``rows`` are the places of those
    whose first dim counts rows."""

    module: nn.Module
    state: Mapping[str, Tensor]
    tensors: tuple[Tensor, ...]
    leaves: tuple[Any, ...]
    spec: Any

    @property
    def rows(self) -> tuple[int, ...]:
        """The places of tensors with as many rows as the first."""
        count = self.tensors[0].shape[0]
        return tuple(
            place for place, one in enumerate(self.tensors) if one.dim() and one.shape[0] == count
        )

    def __call__(self, tensors: Sequence[Tensor], state: Mapping[str, Tensor]) -> list[Tensor]:
        """Run the module on other tensors and another state."""
        left = iter(tensors)
        filled = [next(left) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(filled, self.spec)
        result = functional_call(self.module, dict(state), tuple(args), kwargs)
        return [one for one in pytree.tree_leaves(result) if isinstance(one, Tensor)]

    @cached_property
    def attributes(self) -> Fingerprint:
        """What the module keeps in Python, as it was when first asked for."""
        return fingerprint(self.module)

    def wide(self) -> Given:
        """Return the call in float64."""
        state = {name: _wide(one) for name, one in self.state.items()}
        tensors = tuple(map(_wide, self.tensors))
        return Given(self.module, state, tensors, self.leaves, self.spec)


def given_call(module: nn.Module, args: Any, kwargs: Any) -> Given:
    """Return a call as it was seen, with copies of its tensors."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    tensors = tuple(leaf.detach().clone() for leaf in leaves if isinstance(leaf, Tensor))
    state = {
        name: one.detach() for name, one in (*module.named_parameters(), *module.named_buffers())
    }
    return Given(module, state, tensors, tuple(leaves), spec)


def are_twins(one: Given, other: Given) -> bool:
    """Whether two calls differ in nothing but values: of tensors passed, and of parameters and buffers."""
    return (
        one.spec == other.spec
        and [_kind(leaf) for leaf in one.leaves] == [_kind(leaf) for leaf in other.leaves]
        and _kinds(one.state) == _kinds(other.state)
        and _code(one.module) == _code(other.module)
        and not changes(one.attributes, other.attributes)
    )


def _kind(leaf: Any) -> Any:
    """Return what two arguments must have in common: of tensors how they lie, of others themselves."""
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.stride()
    return type(leaf), leaf if isinstance(leaf, PLAIN) else id(leaf)


def _kinds(state: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name: _kind(one) for name, one in state.items()}


def _code(module: nn.Module) -> list[Any]:
    """Return what runs when a module is called: of every submodule its class, what it was given in its place, its
    hooks and its mode."""
    return [
        (path, type(one), vars(one).get("forward"), one.training,
         *(list(vars(one)[hooks].values()) for hooks in sorted(vars(one)) if hooks.endswith("_hooks")))
        for path, one in module.named_modules(remove_duplicate=False)
    ]  # fmt: skip


def rows_of(given: Given) -> tuple[int, ...]:
    """Return which tensors of a call have rows that are computed each by itself; () where some are not,
    or where that cannot be seen."""
    first = given.tensors[0] if given.tensors else torch.empty(())
    if first.dim() < 2 or not first.shape[0] >= 2 or first.numel() > MOST_ELEMENTS:
        return ()
    for call in (given.wide, lambda: given):  # some kernels have one dtype only
        try:
            return _rows_of(call())
        except NotRows:
            return ()
        except Exception:  # noqa: BLE001 - code of the user's that was given other values
            continue
    return ()


def is_linear(given: Given) -> bool:
    """Whether the gradients of a call's tensors are linear in those of its results."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = given(given.tensors, given.state)
        return adds_up(
            lambda change: _differentiated(given, given.tensors, list(map(change, made)))[1]
        )


def adds_up(back: Callable[[Change], Sequence[Tensor | None]]) -> bool:
    """Whether the gradients that ``back`` makes of a sum are the sums of those it makes of its terms; it is told what
    the gradient of each result is."""

    def powers(*those: int) -> Change:
        def gradient(result: Tensor) -> Tensor:
            draws = torch.Generator().manual_seed(0)
            drawn = 10 * torch.randn(result.shape, generator=draws, dtype=torch.float64)
            return torch.stack([drawn**power for power in those]).sum(0)

        return gradient

    found = zip(back(powers(1)), back(powers(3)), back(powers(1, 3)), strict=True)
    return all(
        _alike([one + other], [both], _rounding(both))
        for one, other, both in found
        if one is not None and other is not None and both is not None
    )


def _rounding(gradient: Tensor) -> float:
    """Return how far apart rounding may take what is equal: never as far as a clamp does."""
    return min(max(1000 * torch.finfo(gradient.dtype).eps, 1e-9), 0.1)


def _rows_of(given: Given) -> tuple[int, ...]:
    with torch.random.fork_rng(devices=[]), torch.no_grad(), WithoutDropout():
        torch.manual_seed(0)
        draws = list(_draws(given))
        for tensors in draws:
            _check_pieces(given, tensors)
        with _evaluating(given.module):
            for tensors in draws:
                _check_pieces(given, tensors)
        natural = [given(tensors, given.state) for tensors in draws]
        first = Answers()
        if _agrees(given, draws, natural, first):
            return given.rows
        lines = frozenset(first.asked)
        others = [
            lines,
            *(frozenset({line}) for line in sorted(lines)),
            *(lines - {line} for line in sorted(lines)),
        ]
        for denied in dict.fromkeys(others[: 2 * MOST_LINES]):
            if denied and _agrees(given, draws, natural, Answers(denied)):
                return given.rows
    return ()


@contextlib.contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module into evaluation mode, in which it may go another way."""
    modes = [(one, one.training) for one in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for one, training in modes:
            one.training = training


def _draws(given: Given) -> Iterator[tuple[Tensor, ...]]:
    """Yield the tensors as they are, their rows in another order and shaken, of sizes that differ by
    far, and all alike."""
    rows, count = set(given.rows), given.tensors[0].shape[0]
    yield given.tensors
    orders, sizes = torch.randperm(count), torch.logspace(-3, 5, count)
    for change in (
        lambda one: _shaken(one[orders]),
        lambda one: _sized(_shaken(one), sizes),
        lambda one: _shaken(_first(one).expand(one.shape)),
        lambda one: _shaken(_first(one.flip(0)).expand(one.shape)),
    ):
        yield tuple(
            change(one).contiguous() if p in rows else one for p, one in enumerate(given.tensors)
        )


def _first(tensor: Tensor) -> Tensor:
    """Return the first vector along the last dim."""
    return tensor[:1] if tensor.dim() < 2 else tensor.reshape(-1, tensor.shape[-1])[:1]


def _sized(tensor: Tensor, sizes: Tensor) -> Tensor:
    """Return rows times their sizes."""
    if not tensor.is_floating_point():
        return tensor
    return tensor * sizes.view(-1, *[1] * (tensor.dim() - 1)).to(tensor.dtype)


def _shaken(tensor: Tensor) -> Tensor:
    """Return rows with something of the same size added, to all alike where they are alike."""
    if not tensor.is_floating_point():
        return tensor
    noise = torch.randn_like(tensor) * (tensor.std() + 0.1)
    same = _first(tensor)
    return tensor + (_first(noise) if bool((tensor == same).all()) else noise)


def _agrees(
    given: Given,
    draws: Sequence[tuple[Tensor, ...]],
    natural: Sequence[list[Tensor]],
    answers: Answers,
) -> bool:
    """Whether rows stay apart and, with these answers, give what they give by themselves."""
    for tensors, expected in zip(draws, natural, strict=True):
        try:
            found, is_apart = _followed(given, tensors, answers)
        except NotRows:
            return False
        if not is_apart or not _alike(expected, found, _tolerance(given)):
            return False
    return all(answers.asked.values())


def _followed(
    given: Given, tensors: Sequence[Tensor], answers: Answers
) -> tuple[list[Tensor], bool]:
    """Return the results of a run that follows rows, and whether they stay apart."""
    count = tensors[0].shape[0]
    owners = Owners(answers)
    for place in given.rows:
        owners.enter(tensors[place])
    with Seen(), Following(owners, [*tensors, *given.state.values()]):
        results = given(tensors, given.state)
    is_apart = bool(results)
    for one in results:
        if not one.dim() or one.shape[0] != count or owners.ragged(one):
            return results, False
        own = torch.arange(count).view(-1, *[1] * (one.dim() - 1))
        found = owners.of(one)
        is_apart = is_apart and bool(((found == own) | (found == FREE)).all())
    return results, is_apart


def _check_pieces(given: Given, tensors: Sequence[Tensor]) -> None:
    """Raise NotRows unless pieces of the rows give what all rows give, gradients included."""
    count, rows = tensors[0].shape[0], set(given.rows)
    weights = [torch.randn(one.shape, dtype=torch.float64) for one in given(tensors, given.state)]
    whole = _differentiated(given, tensors, weights)
    for cut in {count // 2, 1}:
        pieces = [
            _differentiated(
                given,
                [one[piece] if place in rows else one for place, one in enumerate(tensors)],
                [one[piece] for one in weights],
            )
            for piece in (slice(0, cut), slice(cut, count))
        ]
        if not all(
            map(partial(_alike, tolerance=_tolerance(given)), whole, _joined(given, pieces))
        ):
            raise NotRows("pieces give something else")


Found = tuple[list[Tensor], list[Tensor], list[Tensor]]


def _joined(given: Given, pieces: Sequence[Found]) -> Found:
    """Return what two pieces give together: rows beside each other, gradients of what both read added."""
    (results, asked, state), (more, others, states) = pieces
    return (
        [torch.cat(pair) for pair in zip(results, more, strict=True)],
        [
            torch.cat((a, b)) if place in given.rows else a + b
            for place, (a, b) in enumerate(zip(asked, others, strict=True))
        ],
        [a + b for a, b in zip(state, states, strict=True)],
    )


def _differentiated(given: Given, tensors: Sequence[Tensor], weights: Sequence[Tensor]) -> Found:
    """Return results, and the gradients of their weighted sum by tensors and by the state."""
    leaves = [one.detach().clone() for one in tensors]
    state = {name: one.detach().clone() for name, one in given.state.items()}
    every = [*leaves, *state.values()]
    asked = [one.requires_grad_() for one in every if one.is_floating_point()]
    with torch.enable_grad():
        results = given(leaves, state)
        terms = zip(results, weights, strict=True)
        total = sum((one.double() * weight).sum() for one, weight in terms if one.requires_grad)
    gradients: dict[int, Tensor | None] = {}
    if isinstance(total, Tensor):
        made = run_backward([get_gradient_edge(total)], [torch.ones_like(total)], asked)
        gradients = dict(zip(map(id, asked), made, strict=True))
    found = [_gradient(one, gradients.get(id(one))) for one in every]
    return [one.detach() for one in results], found[: len(leaves)], found[len(leaves) :]


def _gradient(tensor: Tensor, found: Tensor | None) -> Tensor:
    return torch.zeros(tensor.shape) if found is None else found


def _alike(one: Sequence[Any], other: Sequence[Any], tolerance: float) -> bool:
    return len(one) == len(other) and all(
        a.shape == b.shape
        and torch.allclose(
            a.double(), b.double(), rtol=tolerance, atol=tolerance * _size(a), equal_nan=True
        )
        for a, b in zip(one, other, strict=True)
    )


def _size(tensor: Tensor) -> float:
    return float(tensor.double().abs().nan_to_num(0, 0, 0).max()) if tensor.numel() else 0.0


def _tolerance(given: Given) -> float:
    floating = [one.dtype for one in given.state.values() if one.is_floating_point()]
    return 1e-9 if all(dtype == torch.float64 for dtype in floating) else 1e-4


def _wide(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor
