"""How gradients are to be compressed: one checked value."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Literal, get_args

from shardwright.core.strategy import Residual
from shardwright.errors import InputError

MethodName = Literal[
    "dense", "bfloat16", "float16", "top-k", "gtop-k", "gtop-k-tree", "int8", "1-bit", "powersgd"
]
Selection = Literal["exact", "threshold", "sample"]
Scope = Literal["parameter", "bucket"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compression:
    """How gradients travel.

    ``method``: ``dense``; ``bfloat16`` or ``float16`` on the wire; the k largest elements of every rank
    by all-gather (``top-k``), or the k largest of their sums, merged by recursive doubling (``gtop-k``)
    or along a tree (``gtop-k-tree``); ``int8`` or ``1-bit`` by all-gather; ``powersgd``.

    ``density`` is k / elements; ``densities`` has others for parameters by name, which is LAGS. In the
    first steps it is each of ``warm_up`` for ``warm_up_steps`` steps. The largest are looked for in
    each parameter or in each bucket (``scope``); only by parameter are results independent of how
    gradients are bucketed. ``selection``: ``exact``; by a ``threshold`` that is made exactly every
    ``threshold_steps`` steps and used again between; by one estimated from a ``sample``.

    ``residual``: what is not sent is added to the next gradient (``conserving``); ``paper`` is the
    published rule of gTop-k, which loses what is dropped while merging; ``none`` forgets it.
    ``momentum`` runs before the selection (momentum correction), and behind the sum of what travels whole: the
    optimizer must then have none. ``masked``: it begins anew where something was sent, as published; else what
    is applied and owed is what the optimizer's momentum would have applied, to rounding. ``clip`` bounds the norm of the gradient that
    all ranks together put in: each parameter of each rank gets its share by size.

    The first ``dense_steps`` steps travel as they are, and with methods that select and ``powersgd`` so do
    parameters of fewer than ``dense_below`` elements. ``rank`` and ``warm_start`` are PowerSGD's. ``seed`` is for what is drawn.
    """

    method: MethodName
    density: float = 0.001
    densities: Mapping[str, float] = field(default_factory=dict)
    warm_up: tuple[float, ...] = ()
    warm_up_steps: int = 1
    scope: Scope = "parameter"
    selection: Selection = "exact"
    threshold_steps: int = 32
    residual: Residual = "conserving"
    momentum: float = 0.0
    masked: bool = True
    clip: float = 0.0
    dense_steps: int = 0
    dense_below: int = 1024
    rank: int = 1
    warm_start: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        self._check_words()
        self._check_kinds()
        self._check_numbers()
        if self.residual == "paper" and not self.method.startswith("gtop-k"):
            raise InputError(
                f"the paper's residual is gTop-k's; with {self.method} choose 'conserving' or 'none'"
            )
        if self.momentum and not self.is_sparse:
            raise InputError(
                f"momentum runs before elements are selected, but {self.method} sends all; leave it to "
                "the optimizer"
            )
        if not self.masked and not self.momentum:
            raise InputError(
                "what is not masked is a momentum before the selection, but there is none; give momentum=0.9"
            )

    def _check_words(self) -> None:
        for name, kind in (
            ("method", MethodName), ("residual", Residual), ("selection", Selection), ("scope", Scope),
        ):  # fmt: skip
            value, known = getattr(self, name), get_args(kind)
            if value not in known:
                raise InputError(
                    f"{name} must be one of {', '.join(known)}, not {value!r:.40}; choose one"
                )

    def _check_kinds(self) -> None:
        if not isinstance(self.densities, Mapping) or not isinstance(self.warm_up, Sequence):
            raise InputError(
                "densities are a mapping from names of parameters and warm_up is a sequence, not "
                f"{self.densities!r:.40} and {self.warm_up!r:.40}; give "
                'densities={"head.weight": 0.01}, warm_up=(0.25, 0.05)'
            )

    def _check_numbers(self) -> None:
        for value in (self.density, *self.warm_up, *self.densities.values()):
            if not _is_within(value, 1) or not value:
                raise InputError(
                    f"a density is the share of elements that is sent, above 0 and at most 1, not {value!r:.40}"
                )
        if not _is_within(self.momentum, 1) or self.momentum == 1:
            raise InputError(f"momentum must be 0 to less than 1, not {self.momentum!r:.40}")
        if not _is_within(self.clip, sys.float_info.max):
            raise InputError(
                f"the norm to clip at must be finite and not negative, not {self.clip!r:.40}"
            )
        least = {
            "warm_up_steps": 1,
            "threshold_steps": 1,
            "rank": 1,
            "dense_steps": 0,
            "dense_below": 0,
        }
        for name, bound in least.items():
            value = getattr(self, name)
            if not isinstance(value, int) or value < bound:
                raise InputError(
                    f"{name} must be a whole number of at least {bound}, not {value!r:.40}"
                )

    @property
    def is_sparse(self) -> bool:
        """Whether elements are selected."""
        return self.method.startswith(("top-k", "gtop-k"))

    def density_at(self, step: int, name: str = "") -> float:
        """Return the density of a parameter in a step, counted from 0."""
        stage = step // self.warm_up_steps
        if stage < len(self.warm_up):
            return self.warm_up[stage]
        return self.densities.get(name, self.density)

    def kept_at(self, step: int, name: str, elements: int) -> int:
        """Return how many of a parameter's elements are sent: at least one."""
        return max(1, int(elements * self.density_at(step, name)))


def _is_within(value: object, most: float) -> bool:
    """Whether it is a number from 0 to another."""
    return isinstance(value, Real) and 0 <= float(value) <= most
