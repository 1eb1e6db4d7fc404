"""What lives from step to step: residuals, velocities, factors and thresholds, by parameter name."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor

from shardwright.core.compression import is_low_rank
from shardwright.ddp.methods import METHODS, Exchanged, Load, Lot, scatter, wire_bytes
from shardwright.ddp.selecting import Selector, are_finite, drawing
from shardwright.ddp.settings import Compression
from shardwright.ddp.wire import Wire
from shardwright.errors import InputError
from shardwright.runtime.compression import MOST_ELEMENTS, all_finite

VERSION = 1
_STATES = ("residual", "velocity", "factor")

State = dict[str, Any]
# Received bytes for which a message is sent: torch's own first bucket, whose gradients wait no longer for others.
AT_ONCE = 2**20


@dataclass(frozen=True, slots=True)
class _Taken:
    """Gradients of a bucket that wait to be sent: those that travel as they are, and those that are compressed, as
    a lot of which ``mine`` is this rank's message."""

    plain: Mapping[str, Tensor]
    packed: Mapping[str, Tensor]
    lot: Lot | None
    mine: Any
    velocities: Mapping[str, Tensor]

    @property
    def dtype(self) -> torch.dtype:
        """That of the gradients; one bucket has one."""
        return next(iter((self.plain or self.packed).values())).dtype


class Compressor:
    """Averages gradients over ranks by one method, and keeps what it owes.

    State is of this rank, but for factors, which are equal on all. It belongs to parameters by name,
    so that it outlives any change of buckets. Residuals are float32 where gradients are narrower.
    """

    def __init__(
        self,
        settings: Compression,
        wire: Wire,
        elements: int = 0,
        names: Collection[str] = (),
    ) -> None:
        """``elements`` are those of all parameters, by whose share each is clipped; ``names`` are theirs, where known."""
        if settings.clip and not elements:
            raise InputError("clipping by share needs the number of elements of all parameters")
        self.settings, self.wire, self._elements = settings, wire, elements
        self._names = frozenset(names)
        self.step = 0
        self.skipped = 0
        self._kept: dict[str, dict[str, Tensor]] = {kind: {} for kind in _STATES}
        self._waiting: list[_Taken] = []
        self._selector = Selector(settings, wire.rank)

    def average(self, gradients: Mapping[str, Tensor], *, is_last: bool = True) -> None:
        """Replace gradients by their means over all ranks; ``is_last``: this ends the step.

        All ranks give equal names in equal order. Where a rank has a value that is not finite all get
        NaN for all of these gradients that are compressed, and owe what they owed before.
        """
        self._take(gradients)
        self._send()
        self.step += is_last

    def offer(self, gradients: Mapping[str, Tensor], *, is_last: bool) -> bool:
        """Do so now, or with what comes next in this step, where all that waits is few bytes; return whether it is
        done, for all that waited. What is compressed is so at once, beside what computes the next gradients."""
        self._take(gradients)
        is_worth_sending = is_last or self._waiting_bytes() >= AT_ONCE
        if is_worth_sending:
            self._send()
        self.step += is_last
        return is_worth_sending

    def _take(self, gradients: Mapping[str, Tensor]) -> None:
        """Have gradients wait to be sent, compressed where they are to be."""
        self._clip(gradients.values())
        packed = {name: one for name, one in gradients.items() if self._is_packed(name, one)}
        plain = {name: one for name, one in gradients.items() if name not in packed}
        try:
            self._waiting.append(_Taken(plain, packed, *self._begun(packed)))
        except InputError:
            self._waiting.clear()  # of a step that ends here
            raise

    def _send(self) -> None:
        """Exchange what waits, all of a dtype together, and put means in the place of gradients."""
        waiting, self._waiting = self._waiting, []
        found: dict[torch.dtype, list[_Taken]] = {}
        for one in waiting:
            found.setdefault(one.dtype, []).append(one)
        for alike in found.values():
            self._exchange(alike)

    def _waiting_bytes(self) -> float:
        """Return what the busiest rank would receive for all that waits."""
        total = 0.0
        for one in self._waiting:
            whole = sum(gradient.nbytes for gradient in one.plain.values())
            total += wire_bytes("dense", Load(self.wire.size, whole, width=1))
            if one.lot is not None:
                total += wire_bytes(self.settings.method, one.lot.load())
        return total

    def _is_packed(self, name: str, gradient: Tensor) -> bool:
        """Whether a gradient is compressed: not where it is small, or all of it would be sent."""
        settings, size = self.settings, gradient.numel()
        if self.step < settings.dense_steps or not size:
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
        scatter(flat, gradients)

    def _carry_on(self, means: Mapping[str, Tensor]) -> None:
        """Give the momentum that the optimizer has not to what travelled whole, behind the sum."""
        for name, velocity in self._velocities(means).items() if self.settings.momentum else ():
            self._kept["velocity"][name] = velocity
            means[name].copy_(velocity.view(means[name].shape))

    def _clip(self, gradients: Iterable[Tensor]) -> None:
        for gradient in gradients if self.settings.clip else ():
            gradient.mul_(self._scale(gradient))

    @staticmethod
    def _are_finite(means: Iterable[Tensor]) -> bool:
        return all(bool(all_finite(one)) for one in means if one.numel())

    def _begun(
        self, gradients: Mapping[str, Tensor]
    ) -> tuple[Lot | None, Any, Mapping[str, Tensor]]:
        """Return what is compressed of gradients as a lot, what is to be sent of it, and the velocities in it."""
        if not gradients:
            return None, None, {}
        velocities = self._velocities(gradients)
        flat, near = self._with_residuals(velocities)
        if not are_finite(flat, {name: len(one) for name, one in velocities.items()}, near):
            flat.fill_(math.nan)  # which every method hands on to all ranks
        lot = self._lot(flat, gradients, near)
        return lot, METHODS[self.settings.method].begin(lot), velocities

    def _exchange(self, taken: Sequence[_Taken]) -> None:
        """Exchange what was taken; only where all that came is finite states change."""
        plain = dict(chain.from_iterable(each.plain.items() for each in taken))
        if plain:
            self._sum(list(plain.values()))
        is_finite = self._are_finite(plain.values())  # of sums, so that all ranks say the same
        packed = [each for each in taken if each.packed]
        found = self._exchanged(packed) if is_finite else []
        if not is_finite or not all(one.is_finite for one in found):
            self._skip(packed)
            return
        self._carry_on(plain)
        for each, one in zip(packed, found, strict=True):
            self._commit(each, one)

    def _exchanged(self, packed: Sequence[_Taken]) -> list[Exchanged]:
        begun = [(cast(Lot, each.lot), each.mine) for each in packed]
        return METHODS[self.settings.method].exchange(begun, self.wire) if begun else []

    def _skip(self, packed: Sequence[_Taken]) -> None:
        """Let all ranks see that something was not finite."""
        self.skipped += 1
        for gradient in chain.from_iterable(each.packed.values() for each in packed):
            gradient.fill_(math.nan)

    def _velocities(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return gradients as they enter the selection: flat, wide, and, with momentum, in memory of their own."""
        found = dict[str, Tensor]()
        for name, gradient in gradients.items():
            wide = gradient.reshape(-1).to(torch.promote_types(gradient.dtype, torch.float32))
            before = self._kept["velocity"].get(name)
            if self.settings.momentum:
                so_far = torch.zeros_like(wide) if before is None else before.to(wide.device)
                wide = so_far.mul(self.settings.momentum).add_(wide)
            found[name] = wide
        return found

    def _scale(self, gradient: Tensor) -> Tensor:
        """Return what bounds a gradient's norm by its share: clip x sqrt(size / elements / ranks)."""
        share = gradient.numel() / self._elements / self.wire.size
        wide = torch.promote_types(gradient.dtype, torch.float32)
        norm = torch.linalg.vector_norm(gradient, dtype=wide)  # squares of halves overflow
        return (self.settings.clip * math.sqrt(share) / norm).clamp(max=1.0)

    def _with_residuals(self, velocities: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return what is to be sent, one behind the other, in memory of its own: of what is not sent the next
        residuals are made. And where the largest elements of a parameter are, as far as that is known."""
        near = dict[str, Tensor]()
        sizes, given = [len(one) for one in velocities.values()], list(velocities.values())
        flat = torch.empty(sum(sizes), dtype=given[0].dtype, device=given[0].device)
        for part, (name, velocity) in zip(flat.split(sizes), velocities.items(), strict=True):
            residual = self._kept["residual"].get(name)
            if residual is None:
                part.copy_(velocity)
                continue
            if len(residual) != len(velocity):
                raise InputError(
                    f"the residual of {name} has {len(residual)} elements, but its gradient has "
                    f"{len(velocity)}; load the state that was saved with this model"
                )
            found = self._selector.add(name, residual.to(velocity), velocity, part)
            if found is not None:
                near[name] = found
        return flat, near

    def _lot(
        self, flat: Tensor, gradients: Mapping[str, Tensor], near: Mapping[str, Tensor]
    ) -> Lot:
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
        select = partial(self._selector.select, step=self.step, near=near)
        lot = Lot(flat, names, shapes, kept, self.settings, select, self.wire.size)
        if len(names) == len(gradients):
            _put_in_place(lot, list(gradients.values()))
        if self.settings.method == "powersgd":
            lot.factors = {n: self._factor(n, s, flat) for n, s in zip(names, shapes, strict=True)}
        return lot

    def _factor(self, name: str, shape: torch.Size, flat: Tensor) -> Tensor:
        """Return PowerSGD's right factor: that of the last step, or one drawn, equal on all ranks."""
        rows, columns = shape[0], math.prod(shape[1:])
        kept = self._kept["factor"].get(name)
        if self.settings.warm_start and kept is not None and bool(kept.any()):
            return kept.to(flat)
        generator = drawing(self.settings.seed, f"{self.step} {name}")
        form = (columns, min(rows, columns, self.settings.rank))
        return torch.randn(form, generator=generator, dtype=flat.dtype).to(flat.device)

    def _commit(self, taken: _Taken, found: Exchanged) -> None:
        """Put means in the place of gradients, and keep what this step leaves behind."""
        sizes, lot = [one.numel() for one in taken.packed.values()], cast(Lot, taken.lot)
        if not lot.is_in_place:
            scatter(lot.means, list(taken.packed.values()))
        if self.settings.residual != "none":
            self._kept["residual"].update(zip(taken.packed, found.owed.split(sizes), strict=True))
        if self.settings.momentum:
            sent = found.sent if self.settings.masked else None
            self._kept["velocity"].update(_masked(taken.velocities, sent))
        if self.settings.method == "powersgd" and self.settings.warm_start:
            self._kept["factor"].update(lot.factors)

    def state_dict(self) -> State:
        """Return what this rank must find again to go on exactly; every rank saves its own."""
        return {
            "version": VERSION,
            "ranks": self.wire.size,
            "step": self.step,
            "thresholds": dict(self._selector.thresholds),
        } | {
            kind: {name: one.clone() for name, one in kept.items()}
            for kind, kept in self._kept.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what this rank saved. Raises InputError where it is another number of ranks',
        or another model's."""
        _check_whole(state)
        if state["ranks"] != self.wire.size:
            raise InputError(
                f"this state is of {state['ranks']} ranks, but {self.wire.size} train; give the states "
                "of all ranks to shardwright.ddp.hooks.reshared first"
            )
        unknown = sorted(set(state["residual"]) - self._names) if self._names else ()
        if unknown:
            raise InputError(
                f"what is owed is of the module's parameters, which has no {', '.join(unknown[:5])}; load the "
                "state that was saved with this model"
            )
        self.step = int(state["step"])
        self._selector.thresholds = {
            name: (at, size) for name, (at, size) in state["thresholds"].items()
        }
        for kind, kept in self._kept.items():
            kept.clear()
            kept.update({name: one.clone() for name, one in state[kind].items()})

    def owed(self, name: str) -> Tensor | None:
        """Return what this rank owes to a parameter (flat, as its gradient lies in memory), None where it never owed
        anything."""
        return self._kept["residual"].get(name)


def _check_whole(state: Mapping[str, Any]) -> None:
    """Raise InputError for what ``state_dict`` did not make."""
    is_state = isinstance(state, Mapping)
    version = state.get("version") if is_state else None
    missing = {"ranks", "step", "thresholds", *_STATES}.difference(state if is_state else ())
    if version != VERSION or missing:
        what = f"lacks {', '.join(sorted(missing))}" if version == VERSION else f"is of {version!r}"
        raise InputError(
            f"a compressor's state is whole and of version {VERSION}, but this {what}; load one that "
            "state_dict() made"
        )


def _check_all(states: Sequence[Mapping[str, Any]]) -> None:
    """Raise InputError where states are not those of all ranks."""
    numbers = [state.get("ranks") for state in states if isinstance(state, Mapping)]
    if not states or any(one not in (None, len(states)) for one in numbers):
        raise InputError(
            f"states of all ranks are needed to share them out, but {len(states)} of {numbers[0] if states else 0} are "
            "given; give the one of each rank, in rank order"
        )
    for state in states:
        _check_whole(state)


def reshared(states: Sequence[Mapping[str, Any]], ranks: int) -> list[State]:
    """Return states for another number of ranks, from those of all ranks.

    What is owed to a parameter is the mean of the residuals, since means are what is applied: every new
    rank gets the mean. Velocities likewise. Raises InputError for an incomplete set.
    """
    if ranks < 1:
        raise InputError(
            f"states are shared out among at least one rank, not {ranks}; give ranks=2"
        )
    _check_all(states)
    first = states[0]
    shared = dict(first) | {"ranks": ranks, "thresholds": {}}
    shared |= {kind: _means([state[kind] for state in states]) for kind in ("residual", "velocity")}
    return [dict(shared) for _ in range(ranks)]


def _masked(velocities: Mapping[str, Tensor], sent: Tensor | None) -> dict[str, Tensor]:
    """Return flat velocities that begin anew at those places of all of them where something was sent."""
    if sent is None:
        return dict(velocities)
    flat = torch.cat(list(velocities.values())).index_fill_(0, sent, 0)
    parts = flat.split([len(one) for one in velocities.values()])
    return {name: one.clone() for name, one in zip(velocities, parts, strict=True)}


def _means(terms: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return means by name; who has none has zero."""
    sums = dict[str, Tensor]()
    for one in terms:
        for name, tensor in one.items():
            sums[name] = sums[name] + tensor if name in sums else tensor
    return {name: total / len(terms) for name, total in sums.items()}


def _put_in_place(lot: Lot, gradients: Sequence[Tensor]) -> None:
    """Let the means of a lot lie where the gradients do, if these share one memory, as DistributedDataParallel's do
    that of their bucket."""
    memory, dtype = gradients[0].untyped_storage(), lot.flat.dtype
    is_one = all(one.untyped_storage().data_ptr() == memory.data_ptr() for one in gradients)
    if is_one and all(one.is_contiguous() and one.dtype is dtype for one in gradients):
        lot.means = gradients[0].as_strided((memory.nbytes() // dtype.itemsize,), (1,), 0)
        lot.places, lot.is_in_place = [int(one.storage_offset()) for one in gradients], True
