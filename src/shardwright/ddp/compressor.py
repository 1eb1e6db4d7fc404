"""What lives from step to step: residuals, velocities, factors and thresholds, by parameter name."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.core.compression import is_low_rank
from shardwright.ddp.methods import METHODS, Exchanged, Lot
from shardwright.ddp.settings import Compression
from shardwright.ddp.wire import Wire
from shardwright.errors import InputError
from shardwright.runtime.compression import (
    MOST_ELEMENTS,
    above,
    all_finite,
    largest,
    sampled_threshold,
)

SAMPLED = 0.01  # share of elements that a threshold is estimated from (Deep Gradient Compression)
LEAST_SAMPLE = 1024
VERSION = 1
_STATES = ("residual", "velocity", "factor")

State = dict[str, Any]


class Compressor:
    """Averages gradients over ranks by one method, and keeps what it owes.

    State is of this rank, but for factors, which are equal on all. It belongs to parameters by name,
    so that it outlives any change of buckets. Residuals are float32 where gradients are narrower.
    """

    def __init__(self, settings: Compression, wire: Wire, elements: int = 0) -> None:
        """``elements`` are those of all parameters, by whose share each is clipped."""
        if settings.clip and not elements:
            raise InputError("clipping by share needs the number of elements of all parameters")
        self.settings, self.wire, self._elements = settings, wire, elements
        self.step = 0
        self.skipped = 0
        self._kept: dict[str, dict[str, Tensor]] = {kind: {} for kind in _STATES}
        # Of a unit: the step that made its threshold, and the threshold.
        self._thresholds: dict[str, tuple[int, float]] = {}

    def average(self, gradients: Mapping[str, Tensor], *, is_last: bool = True) -> None:
        """Replace gradients by their means over all ranks; ``is_last``: this ends the step.

        All ranks give equal names in equal order. Where a rank has a value that is not finite all get
        NaN for all of these gradients, and owe what they owed before.
        """
        self._clip(gradients.values())
        packed = {name: one for name, one in gradients.items() if self._is_packed(name, one)}
        plain = {name: one for name, one in gradients.items() if name not in packed}
        if plain:
            self._sum(list(plain.values()))
        is_finite = self._are_finite(plain.values())
        if packed:
            is_finite = self._exchange(packed, is_finite=is_finite)
        if is_finite:
            self._carry_on(plain)
        if is_last:
            self.step += 1

    def _is_packed(self, name: str, gradient: Tensor) -> bool:
        """Whether a gradient is compressed: not where it is small, or all of it would be sent."""
        settings, size = self.settings, gradient.numel()
        if self.step < settings.dense_steps:
            return False
        if settings.method == "powersgd":
            fits = gradient.dim() > 1 and is_low_rank(tuple(gradient.shape), settings.rank)
        elif settings.is_sparse:
            is_owed = name in self._kept["residual"]
            fits = is_owed or settings.kept_at(self.step, name, size) < size
        else:
            return settings.method != "dense"
        return fits and size >= settings.dense_below

    def _sum(self, gradients: Sequence[Tensor]) -> None:
        """Average as DistributedDataParallel does, to the same bits: times 1 / ranks, then the sum."""
        flat = torch.cat([one.reshape(-1) for one in gradients]) * (1 / self.wire.size)
        self.wire.all_reduce(flat)
        _scatter(flat, gradients)

    def _carry_on(self, means: Mapping[str, Tensor]) -> None:
        """Give the momentum that the optimizer has not to what travelled whole, behind the sum."""
        for name, velocity in self._velocities(means).items() if self.settings.momentum else ():
            self._kept["velocity"][name] = velocity.clone()
            means[name].copy_(velocity.view(means[name].shape))

    def _clip(self, gradients: Iterable[Tensor]) -> None:
        for gradient in gradients if self.settings.clip else ():
            gradient.mul_(self._scale(gradient))

    @staticmethod
    def _are_finite(means: Iterable[Tensor]) -> bool:
        return all(bool(all_finite(one)) for one in means if one.numel())

    def _exchange(self, gradients: Mapping[str, Tensor], *, is_finite: bool) -> bool:
        """Exchange what is compressed, and tell whether all that came is finite: only then states change."""
        velocities = self._velocities(gradients)
        inputs = {
            name: self._with_residual(name, velocity) for name, velocity in velocities.items()
        }
        flat = torch.cat(list(inputs.values()))
        if not (is_finite and bool(all_finite(flat))):
            flat.fill_(math.nan)  # which every method hands on to all ranks
        lot = self._lot(flat, gradients)
        found = METHODS[self.settings.method].exchange(lot, self.wire)
        if bool(all_finite(found.mean)):
            self._commit(gradients, lot, found, velocities)
            _scatter(found.mean, list(gradients.values()))
            return True
        self.skipped += 1
        for gradient in gradients.values():
            gradient.fill_(math.nan)
        return False

    def _velocities(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return gradients as they enter the selection: flat, wide, and with momentum."""
        found = dict[str, Tensor]()
        for name, gradient in gradients.items():
            wide = gradient.reshape(-1).to(torch.promote_types(gradient.dtype, torch.float32))
            before = self._kept["velocity"].get(name)
            if self.settings.momentum and before is not None:
                wide = before.to(wide.device).mul(self.settings.momentum).add_(wide)
            found[name] = wide
        return found

    def _scale(self, gradient: Tensor) -> Tensor:
        """Return what bounds a gradient's norm by its share: clip x sqrt(size / elements / ranks)."""
        share = gradient.numel() / self._elements / self.wire.size
        wide = torch.promote_types(gradient.dtype, torch.float32)
        norm = torch.linalg.vector_norm(gradient, dtype=wide)  # squares of halves overflow
        return (self.settings.clip * math.sqrt(share) / norm).clamp(max=1.0)

    def _with_residual(self, name: str, velocity: Tensor) -> Tensor:
        residual = self._kept["residual"].get(name)
        if residual is None:
            return velocity
        if len(residual) != len(velocity):
            raise InputError(
                f"the residual of {name} has {len(residual)} elements, but its gradient has "
                f"{len(velocity)}; load the state that was saved with this model"
            )
        return residual.to(velocity) + velocity

    def _lot(self, flat: Tensor, gradients: Mapping[str, Tensor]) -> Lot:
        """Return the units: parameters, or all of the bucket."""
        names, shapes = list(gradients), [gradient.shape for gradient in gradients.values()]
        kept = [self.settings.kept_at(self.step, n, s.numel()) for n, s in zip(names, shapes)]
        if self.settings.is_sparse and len(flat) > MOST_ELEMENTS:
            raise InputError(
                f"indices on the wire have 32 bits, but a bucket has {len(flat):,} elements; give "
                "DistributedDataParallel a bucket_cap_mb below 8192"
            )
        if self.settings.is_sparse and self.settings.scope == "bucket":
            names, shapes, kept = ["\n".join(names)], [flat.shape], [sum(kept)]
        lot = Lot(flat, names, shapes, kept, self.settings, self._select)
        if self.settings.method == "powersgd":
            lot.factors = {n: self._factor(n, s, flat) for n, s in zip(names, shapes, strict=True)}
        return lot

    def _select(self, unit: Tensor, count: int, name: str) -> Tensor:
        """Return the indices of the largest elements, in the way asked for."""
        kind = self.settings.selection
        if kind == "exact" or count == len(unit) or bool(unit[0].isnan()):
            return largest(unit, count)
        if kind == "sample":
            sample = min(len(unit), max(LEAST_SAMPLE, round(SAMPLED * len(unit))))
            generator = self._generator(f"{self.step} {self.wire.rank} {name}")
            return above(unit, sampled_threshold(unit, count, sample, generator), count)
        made, threshold = self._thresholds.get(name, (-math.inf, 0.0))
        if self.step < made + self.settings.threshold_steps:
            return above(unit, threshold, count)
        found = largest(unit, count)
        self._thresholds[name] = (self.step, float(unit[found].abs().min()))
        return found

    def _factor(self, name: str, shape: torch.Size, flat: Tensor) -> Tensor:
        """Return PowerSGD's right factor: that of the last step, or one drawn, equal on all ranks."""
        rows, columns = shape[0], math.prod(shape[1:])
        kept = self._kept["factor"].get(name)
        if self.settings.warm_start and kept is not None and bool(kept.any()):
            return kept.to(flat)
        generator = self._generator(f"{self.step} {name}")
        form = (columns, min(rows, columns, self.settings.rank))
        return torch.randn(form, generator=generator, dtype=flat.dtype).to(flat.device)

    def _generator(self, what: str) -> torch.Generator:
        digest = hashlib.sha256(f"{self.settings.seed} {what}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))

    def _commit(
        self,
        gradients: Mapping[str, Tensor],
        lot: Lot,
        found: Exchanged,
        velocities: Mapping[str, Tensor],
    ) -> None:
        """Keep what this step leaves behind."""
        sizes = [one.numel() for one in gradients.values()]
        if self.settings.residual != "none":
            owed = found.owed.split(sizes)
            self._kept["residual"].update(zip(gradients, map(torch.clone, owed), strict=True))
        if self.settings.momentum and found.sent is not None:
            velocity = torch.cat(list(velocities.values()))
            velocity[found.sent[lot.flat[found.sent] != 0]] = 0
            parts = map(torch.clone, velocity.split(sizes))
            self._kept["velocity"].update(zip(gradients, parts, strict=True))
        if self.settings.method == "powersgd" and self.settings.warm_start:
            self._kept["factor"].update(lot.factors)

    def state_dict(self) -> State:
        """Return what this rank must find again to go on exactly; every rank saves its own."""
        return {
            "version": VERSION,
            "ranks": self.wire.size,
            "step": self.step,
            "thresholds": dict(self._thresholds),
        } | {
            kind: {name: one.clone() for name, one in kept.items()}
            for kind, kept in self._kept.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what this rank saved. Raises InputError where it is another number of ranks'."""
        if state.get("version") != VERSION:
            raise InputError(
                f"a compressor's state is of version {VERSION}, not {state.get('version')!r}; load one "
                "that state_dict() made"
            )
        if state["ranks"] != self.wire.size:
            raise InputError(
                f"this state is of {state['ranks']} ranks, but {self.wire.size} train; give the states "
                "of all ranks to shardwright.ddp.hooks.reshared first"
            )
        self.step = int(state["step"])
        self._thresholds = {name: (at, size) for name, (at, size) in state["thresholds"].items()}
        for kind, kept in self._kept.items():
            kept.clear()
            kept.update({name: one.clone() for name, one in state[kind].items()})

    def owed(self, name: str) -> Tensor | None:
        """Return what this rank owes to a parameter (flat), None where it never owed anything."""
        return self._kept["residual"].get(name)


def reshared(states: Sequence[Mapping[str, Any]], ranks: int) -> list[State]:
    """Return states for another number of ranks, from those of all ranks.

    What is owed to a parameter is the mean of the residuals, since means are what is applied: every new
    rank gets the mean. Velocities likewise. Raises InputError for an incomplete set.
    """
    if not states or any(state["ranks"] != len(states) for state in states):
        given = states[0]["ranks"] if states else 0
        raise InputError(
            f"states of all ranks are needed to share them out, but {len(states)} of {given} are given; "
            "give the one of each rank, in rank order"
        )
    first = states[0]
    shared = dict(first) | {"ranks": ranks, "thresholds": {}}
    shared |= {kind: _means([state[kind] for state in states]) for kind in ("residual", "velocity")}
    return [dict(shared) for _ in range(ranks)]


def _means(terms: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return means by name; who has none has zero."""
    sums = dict[str, Tensor]()
    for one in terms:
        for name, tensor in one.items():
            sums[name] = sums[name] + tensor if name in sums else tensor
    return {name: total / len(terms) for name, total in sums.items()}


def _scatter(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    for tensor, part in zip(tensors, flat.split([one.numel() for one in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))
