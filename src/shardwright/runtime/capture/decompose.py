"""Losses and norms taken apart: what is a mean over the batch becomes sums that shards can add up, and
what is written to running statistics becomes an operator of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwright.core.graph import SYNCHRONISED
from shardwright.runtime.capture import operators
from shardwright.runtime.capture.einsums import in_pairs
from shardwright.runtime.capture.heads import expanded_from, reshaped_from
from shardwright.runtime.capture.record import (
    Recorder,
    Value,
    aten,
    named_arguments,
    tensors_in,
)
from shardwright.runtime.capture.spellings import ELEMENTWISE_LOSSES, NLL
from shardwright.runtime.capture.vocabulary import FEWEST_CLASSES, block_width

MEAN, SUM = 1, 2
PLACING = frozenset({
    aten.argmax.default, aten.argmin.default, aten.bucketize.Tensor, aten.searchsorted.Tensor,
})  # fmt: skip
REARRANGING = frozenset({
    aten.reshape.default, aten.cat.default, aten.stack.default, aten.unsqueeze.default, aten.squeeze.dim,
    aten.select.int, aten.slice.Tensor, aten.permute.default, aten.transpose.int, aten.flip.default,
    aten.roll.default, aten.detach.default,
})  # fmt: skip


class Decompositions:
    """Emits the parts of operators; ``notes`` receives what a user should know of them."""

    def __init__(self, recorder: Recorder, notes: dict[str, None], synchronised: bool) -> None:
        self.recorder, self.notes, self.synchronised = recorder, notes, synchronised

    def of(self, target: Any) -> Callable[[Any, list[Any], dict[str, Any]], Value] | None:
        """Return what emits an operator in parts, None for one that stays as it is."""
        if target in NLL:
            return self._nll
        if target in ELEMENTWISE_LOSSES:
            return self._elementwise_loss
        return {
            aten.cross_entropy_loss.default: self._cross_entropy,
            aten.batch_norm.default: self._batch_norm,
            aten.instance_norm.default: self._instance_norm,
            aten.masked_scatter.default: self._masked_scatter,
            aten.einsum.default: self._einsum,
        }.get(target)

    def _cross_entropy(self, target: Any, args: list[Any], kwargs: dict[str, Any]) -> Value:
        given = _named(target, args, kwargs)
        reduction = given.pop("reduction")
        if reduction not in (MEAN, SUM):
            return self.recorder.emit(target, *args, **kwargs)
        emit = self.recorder.emit
        tokens = self._before_flattening(given["input"], given["target"])
        if tokens is not None:
            given["input"], given["target"] = tokens
        if _is_vocabulary(given["input"], given["target"]):
            total = self._vocabulary_loss(given)
        elif tokens is not None:
            total = emit(operators.token_cross_entropy_sum, **given)
        else:
            total = emit(operators.cross_entropy_sum, **given)
        if reduction == SUM:
            return total
        self._note_mean()
        labels, dtype = given["target"], _count_dtype(total)
        if labels.meta.is_floating_point():
            classes = given["input"].meta.shape[0 if given["input"].meta.dim() == 1 else 1]
            count = emit(operators.count_rows, labels, classes, dtype=dtype)
        else:
            count = self._count(labels, given, dtype)
        return emit(aten.div.Tensor, total, count)

    def _count(self, labels: Value, given: dict[str, Any], dtype: torch.dtype) -> Value:
        """Emit how many labels count."""
        emit, weight, ignored = self.recorder.emit, given["weight"], given["ignore_index"]
        if weight is None and ignored < 0 and self._are_places(labels):
            return emit(aten.full.default, [], labels.meta.numel(), dtype=dtype)
        return emit(operators.count_targets, labels, weight, ignored, dtype)

    def _are_places(self, labels: Value) -> bool:
        """Whether labels are where something lies, so that none is ignored and a number says how many there are: what
        a network of the model's own picks (codes of a tokenizer) could not be counted before it has run."""
        record = self.recorder.records[labels.producer] if labels.producer >= 0 else None
        if record is None or record.target not in REARRANGING:
            return record is not None and record.target in PLACING
        return all(map(self._are_places, tensors_in(record.args[0])))

    def _vocabulary_loss(self, given: dict[str, Any]) -> Value:
        classes = given["input"].meta.shape[-1]
        blocks = self.recorder.emit(
            operators.vocabulary_logsumexp, given["input"], block_width(classes)
        )
        return self.recorder.emit(
            operators.vocabulary_cross_entropy_sum, **given, blocks=blocks, classes=classes
        )

    def _before_flattening(self, scores: Value, target: Value) -> tuple[Value, Value] | None:
        """Return scores ``.. c`` and classes ``..`` as they were before they were made ``n c``, ``n``."""
        if scores.meta.dim() != 2 or target.meta.dim() != 1:
            return None
        wide = reshaped_from(self.recorder, scores)
        long = reshaped_from(self.recorder, target)
        if wide is None or long is None or wide.meta.shape[-1] != scores.meta.shape[-1]:
            return None
        return (wide, long) if wide.meta.shape[:-1] == long.meta.shape else None

    def _nll(self, target: Any, args: list[Any], kwargs: dict[str, Any]) -> Value:
        given = _named(target, args, kwargs)
        reduction = given.pop("reduction")
        if reduction not in (MEAN, SUM):
            return self.recorder.emit(target, *args, **kwargs)
        labels = given.pop("target")
        total = self.recorder.emit(operators.nll_sum, given.pop("input"), labels, **given)
        if reduction == SUM:
            return total
        self._note_mean()
        count = self._count(labels, given, _count_dtype(total))
        return self.recorder.emit(aten.div.Tensor, total, count)

    def _elementwise_loss(self, target: Any, args: list[Any], kwargs: dict[str, Any]) -> Value:
        given = _named(target, args, kwargs)
        reduction = given.pop("reduction")
        first = given.pop(next(iter(given)))
        each = self.recorder.emit(target, first, reduction=0, **given)
        if reduction == MEAN:
            return self.recorder.emit(aten.mean.default, each)
        return self.recorder.emit(aten.sum.default, each) if reduction == SUM else each

    def _note_mean(self) -> None:
        self.notes["the mean loss is taken as sum over targets divided by the count of targets"] = (
            None
        )

    def _batch_norm(self, target: Any, args: list[Any], kwargs: dict[str, Any]) -> Value:
        given = _named(target, args, kwargs)
        if not given["training"]:
            return self.recorder.emit(target, *args, **kwargs)
        if not self.synchronised:
            self.notes[
                "batch norm takes its statistics over each device's shard of each microbatch"
            ] = None
            return self.recorder.emit(target, *args, **kwargs)
        self.notes[SYNCHRONISED] = None
        emit, x = self.recorder.emit, given["input"]
        dims = [dim for dim in range(x.meta.dim()) if dim != 1]
        mean = emit(aten.mean.dim, x, dims, True)
        centred = emit(aten.sub.Tensor, x, mean)
        variance = emit(aten.mean.dim, emit(aten.mul.Tensor, centred, centred), dims, True)
        if given["running_mean"] is not None:
            count = x.meta.numel() // x.meta.shape[1]
            emit(
                operators.update_running, given["running_mean"], given["running_var"], mean, variance,
                given["momentum"], count / max(count - 1, 1),
            )  # fmt: skip
        scale = emit(aten.rsqrt.default, emit(aten.add.Scalar, variance, given["eps"]))
        result = emit(aten.mul.Tensor, centred, scale)
        shape = [1, x.meta.shape[1], *(1 for _ in dims[1:])]
        for operation, name in ((aten.mul.Tensor, "weight"), (aten.add.Tensor, "bias")):
            if given[name] is not None:
                result = emit(operation, result, emit(aten.reshape.default, given[name], shape))
        return result

    def _instance_norm(self, target: Any, args: list[Any], kwargs: dict[str, Any]) -> Value:
        """Emit the norm alone, and what it does to running statistics beside it."""
        given = _named(target, args, kwargs)
        x, means, variances = given["input"], given["running_mean"], given["running_var"]
        if means is None or not given["use_input_stats"]:
            return self.recorder.emit(target, *args, **kwargs)
        emit, dims = self.recorder.emit, list(range(2, x.meta.dim()))
        with torch.no_grad():
            mean = emit(aten.mean.dim, emit(aten.mean.dim, x, dims), [0])
            variance = emit(aten.mean.dim, emit(aten.var.correction, x, dims, correction=1), [0])
            momentum = given["momentum"]
            emit(operators.update_running, means, variances, mean, variance, momentum, 1.0)
        return emit(target, **{**given, "running_mean": None, "running_var": None})

    def _einsum(self, target: Any, args: list[Any], kwargs: dict[str, Any]) -> Value:
        given = named_arguments(target, args, kwargs)
        left = list(given["tensors"])
        pairs = in_pairs(given["equation"], len(left), given["path"])
        if pairs is None:
            return self.recorder.emit(target, *args, **kwargs)
        for first, second, equation in pairs:
            two, one = left.pop(second), left.pop(first)
            made = self.recorder.emit(target, equation, [one, two])
            left.insert(len(left) if given["path"] else 0, made)
        return left[0]

    def _masked_scatter(self, target: Any, args: list[Any], kwargs: dict[str, Any]) -> Value:
        """Emit rows put where a mask is true as a look-up of the rows, the first for the first place.

        Which row a place gets depends on all places before it, so a shard of the mask does not know; told its
        rows' numbers, it does. Of a mask over single elements the numbers would be larger than what they pick.
        """
        given = _named(target, args, kwargs)
        x, source = given["input"], given["source"]
        mask = expanded_from(self.recorder, given["mask"]) or given["mask"]
        *places, width = x.meta.shape
        is_rows = width > 1 and list(mask.meta.shape) == [*places, 1]
        if not is_rows or source.meta.shape[-1:] != (width,) or not source.meta.numel():
            return self.recorder.emit(target, *args, **kwargs)
        emit = self.recorder.emit
        counts = emit(aten.cumsum.default, emit(aten.reshape.default, mask, [-1]), 0)
        numbers = emit(aten.clamp.default, emit(aten.sub.Scalar, counts, 1), 0)
        numbers = emit(aten.reshape.default, numbers, places)
        rows = emit(aten.reshape.default, source, [-1, width])
        return emit(aten.where.self, mask, emit(aten.embedding.default, rows, numbers), x)


def _is_vocabulary(scores: Value, target: Value) -> bool:
    """Whether scores ``.. c`` of classes ``..`` are so many that a plan may want them split."""
    shape = scores.meta.shape
    return shape[:-1] == target.meta.shape and shape[-1] >= FEWEST_CLASSES and len(shape) > 1


def _named(target: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return every argument by name, defaults included; ``self`` is called ``input``."""
    full = named_arguments(target, args, kwargs)
    return {"input": full.pop("self")} | full if "self" in full else full


def _count_dtype(total: Value) -> torch.dtype:
    """Return the loss's dtype, but at least float32: half precision cannot count past 2048."""
    return torch.promote_types(total.meta.dtype, torch.float32)
