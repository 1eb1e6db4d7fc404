"""Rows that a model sorts by group, multiplies group by group and puts back, in the order in which they lay before.

Sorted, the tokens of all samples mix, so that neither samples nor microbatches could be cut. Between sorting and putting
back every row is worked on by itself, which can as well be done where it lay; only products must know the groups then
(``grouped_product``).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from shardwright.runtime.capture.grouped import grouped_product
from shardwright.runtime.capture.picks import ZEROS
from shardwright.runtime.capture.record import (
    Record,
    Recorder,
    Value,
    aten,
    map_values,
    named_arguments,
    tensors_in,
)

_ARGSORTS = frozenset({aten.argsort.default, aten.argsort.stable})
_SORTS = frozenset({aten.sort.default, aten.sort.stable}) | _ARGSORTS
_CASTS = frozenset({aten.to.dtype, aten._to_copy.default, aten.detach.default, aten.clone.default})
_ZEROS = ZEROS | {aten.new_zeros.default}
_ONES = frozenset({aten.ones.default, aten.ones_like.default, aten.new_ones.default})
_COUNTING = frozenset({aten.arange.default, aten.arange.start})
# What works along a dim, which must not be that of the rows, and what works on the last one.
_ALONG = frozenset({
    aten.chunk.default, aten.split.Tensor, aten.split_with_sizes.default, aten.slice.Tensor, aten.select.int,
    aten.unsqueeze.default, aten.squeeze.dim, aten.softmax.int, aten.unbind.int, aten.glu.default,
})  # fmt: skip
_BY_ROW = frozenset({aten.linear.default, aten.layer_norm.default, aten.rms_norm.default}) | _CASTS
_PRODUCTS = ("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default")


def unsorted(records: Sequence[Record], results: Iterable[Value]) -> list[Record]:
    """Rewrite what lies between a sort of rows by group and their way back, where groups are multiplied."""
    found, ends = list(records), frozenset(results)
    if any(str(record.target) in _PRODUCTS for record in found):
        for sort in [one for one in found if one.target in _SORTS and _sorts_groups(one)]:
            if sort in found:  # not the way back of another
                found = _Rows(sort, found).rewritten(ends) or found
    return found


@dataclass
class _Rows:
    """The rows that one sort moves.

    ``lying``: what is made of them, and the same as it lies unsorted. ``order``: numbers of sorted rows, and how many
    copies of each row there are. ``back``: where sorted rows were put; ``blank``: what will hold them. ``instead``: what takes the place of what came of
    all that.
    """

    sort: Record
    records: list[Record]
    lying: dict[Value, Value] = field(default_factory=dict[Value, Value])
    order: dict[Value, int] = field(default_factory=dict[Value, int])
    back: set[Value] = field(default_factory=set[Value])
    blank: set[Value] = field(default_factory=set[Value])
    instead: dict[Value, Value] = field(default_factory=dict[Value, Value])

    def __post_init__(self) -> None:
        self.makers = {value: record for record in self.records for value in record.outputs}
        self.groups: Value = self.sort.args[0]
        self.count = self.groups.meta.shape[0]
        self.order[self.sort.outputs[-1]] = 1
        if self.sort.target not in _ARGSORTS:
            self.lying[self.sort.outputs[0]] = self.groups

    def rewritten(self, results: frozenset[Value]) -> list[Record] | None:
        """Return all records; None where sorted rows, or their order, come to anything else."""
        first = self.records.index(self.sort)
        made, has_product = self.records[:first], False
        for record in self.records[first + 1 :]:
            read = set(tensors_in([record.args, list(record.kwargs.values())]))
            if not self._is_moved(read):
                is_same = read.isdisjoint(self.instead)
                made.append(record if is_same else self._with_instead(record))
                continue
            recorder = Recorder(node_name=record.name, path=record.path)
            with torch.set_grad_enabled(any(one.meta.requires_grad for one in record.outputs)):
                if not self._rewrite(record, _arguments(record), recorder):
                    return None
            has_product |= str(record.target) in _PRODUCTS
            made += recorder.records
        is_whole = (
            has_product and not self._is_moved(set(results)) and not results & self.instead.keys()
        )
        return made if is_whole and self.instead else None

    def _is_moved(self, values: set[Value]) -> bool:
        return any(value in one for value in values for one in (self.lying, *self._places()))

    def _places(self) -> tuple[Container[Value], ...]:
        return self.order, self.back, self.blank

    def _with_instead(self, record: Record) -> Record:
        def place(value: Value) -> Value:
            return self.instead.get(value, value)

        kwargs = {name: map_values(value, place) for name, value in record.kwargs.items()}
        return replace(record, args=tuple(map_values(record.args, place)), kwargs=kwargs)

    def _rewrite(self, record: Record, given: dict[str, Any], recorder: Recorder) -> bool:
        """Take one record that reads sorted rows or their order; False where it may mix them."""
        special = _SPECIAL.get(str(record.target).removesuffix(".default"))
        if special is not None and special(self, record, given, recorder):
            return True
        if not self._is_by_row(record, given):
            return False
        self.lying.update(zip(record.outputs, self._again(record, recorder), strict=True))
        return True

    def _again(self, record: Record, recorder: Recorder) -> Sequence[Value]:
        """Emit a call with unsorted rows in place of sorted ones."""

        def place(value: Value) -> Value:
            return self.lying.get(value) or self.instead.get(value, value)

        kwargs = {name: map_values(value, place) for name, value in record.kwargs.items()}
        made = recorder.emit(record.target, *map_values(record.args, place), **kwargs)
        return [made] if isinstance(made, Value) else made

    def _is_by_row(self, record: Record, given: dict[str, Any]) -> bool:
        """Whether a call works on each row by itself: of other tensors there is one row for all."""
        target = record.target
        read = list(tensors_in([record.args, list(record.kwargs.values())]))
        if any(one in places for one in read for places in self._places()):
            return False
        if target in _ALONG:
            rank = read[0].meta.dim() + (target is aten.unsqueeze.default)
            return given.get("dim", 0) % rank != 0
        if target is aten.reshape.default:
            return record.outputs[0].meta.shape[:1] == (self.count,)
        if target in _BY_ROW:
            return not any(one in self.lying for one in read[1:])
        is_pointwise = torch.Tag.pointwise in getattr(target, "tags", ())
        return is_pointwise and self._are_beside(read, record.outputs[0].meta.dim())

    def _are_beside(self, values: Sequence[Value], rank: int) -> bool:
        return all(self._is_beside(one, rank) for one in values)

    def _is_beside(self, value: Value, rank: int) -> bool:
        """Whether a tensor's rows, or one for all, lie along the first of so many dims."""
        shape = value.meta.shape
        if value in self.lying:
            return len(shape) == rank
        return len(shape) < rank or shape[0] == 1

    # -- operators that know of the order ----------------------------------------------------------

    def _divide(self, record: Record, given: dict[str, Any], _: Recorder) -> bool:
        """Of which row a copy is, where copies lie together."""
        copies, mode = given.get("other"), given.get("rounding_mode", "floor")
        if record.args[0] not in self.order or not isinstance(copies, int) or not mode:
            return False
        self.order[record.outputs[0]] = self.order[record.args[0]] * copies
        return True

    def _pick(self, record: Record, given: dict[str, Any], recorder: Recorder) -> bool:
        """Sort rows, put them back, or look something up for each."""
        source: Value = given["self"]
        places = given.get("indices", [given.get("index")])
        if len(places) != 1 or given.get("dim", 0) != 0:
            return False
        place, made = places[0], record.outputs[0]
        if source in self.lying:
            if place in self.back:
                self.instead[made] = self.lying[source]
            return place in self.back
        if place in self.order:
            return self._copy(source, made, self.order[place], recorder)
        if place in self.lying:
            self.lying[made] = self._again(record, recorder)[0]
        return place in self.lying

    def _copy(self, source: Value, made: Value, copies: int, recorder: Recorder) -> bool:
        """Sort copies of rows, which lie beside each other unsorted."""
        if source.meta.shape[0] * copies != self.count:
            return False
        each = self.instead.get(source, source)
        if copies > 1:
            each = recorder.emit(aten.repeat_interleave.self_int, each, copies, 0)
        self.lying[made] = each
        return True

    def _put(self, record: Record, given: dict[str, Any], _: Recorder) -> bool:
        """Put sorted rows, or the numbers of all, where they came from."""
        places, values, made = given["indices"], given["values"], record.outputs[0]
        is_whole = len(places) == 1 and self.order.get(places[0]) == 1 and not given["accumulate"]
        if (
            not is_whole
            or made.meta.shape != values.meta.shape
            or values.meta.dtype != made.meta.dtype
        ):
            return False
        if values in self.lying:
            self.instead[made] = self.lying[values]
            return True
        maker = self.makers.get(values)
        if maker is None or maker.target not in _COUNTING or maker.kwargs.get("start"):
            return False
        self.back.add(made)
        return True

    def _add(self, record: Record, given: dict[str, Any], recorder: Recorder) -> bool:
        """Add the copies of every row up, to zeros."""
        base, copies = self.makers.get(given["self"]), self.order.get(given["index"])
        rows = given["source"]
        is_sum = rows in self.lying and given.get("alpha", 1) == 1 and given["dim"] == 0
        if not is_sum or copies is None or base is None or base.target not in _ZEROS:
            return False
        made, each = record.outputs[0].meta, self.lying[rows]
        if made.shape[0] * copies != self.count or made.dtype != rows.meta.dtype:
            return False
        if copies > 1:
            apart = recorder.emit(
                aten.reshape.default, each, [made.shape[0], copies, *made.shape[1:]]
            )
            each = recorder.emit(aten.sum.dim_IntList, apart, [1])
        self.instead[record.outputs[0]] = each
        return True

    def _like(self, record: Record, _: dict[str, Any], __: Recorder) -> bool:
        """What lends its shape is not read; what is made so must be written whole."""
        self.blank.update(record.outputs)
        return True

    def _count(self, record: Record, _: dict[str, Any], recorder: Recorder) -> bool:
        """Counts are the same in whatever order."""
        if record.args[0] not in self.lying:
            return False
        self.instead[record.outputs[0]] = self._again(record, recorder)[0]
        return True

    def _return(self, record: Record, given: dict[str, Any], _: Recorder) -> bool:
        """The order of the order: where each row was put."""
        if self.order.get(record.args[0]) != 1 or given.get("descending"):
            return False
        self.back.add(record.outputs[0])
        return True

    def _multiply(self, record: Record, given: dict[str, Any], recorder: Recorder) -> bool:
        rows, weight, ends = record.args[:3]
        if (
            rows not in self.lying
            or weight.meta.dim() != 3
            or not self._ends_groups(ends, weight.meta.shape[0])
        ):
            return False
        weight = self.instead.get(weight, weight)
        self.lying[record.outputs[0]] = recorder.emit(
            grouped_product, self.lying[rows], weight, self.groups
        )
        return True

    def _ends_groups(self, ends: Value, count: int) -> bool:
        """Whether numbers say where each of so many groups ends, of rows in the order of their groups."""
        added = self._made_by(ends)
        if added is None or added.target is not aten.cumsum.default:
            return False
        counted = self._made_by(added.args[0])
        return counted is not None and self._counts_groups(counted, count)

    def _counts_groups(self, record: Record, count: int) -> bool:
        given = _arguments(record)
        if record.target is aten.histc.default:
            limits = given["bins"], given["min"], given["max"]
            return limits == (count, 0, count - 1) and self._are_groups(record.args[0])
        if record.target is aten.scatter_add.default:
            return self._adds_ones(given, count) and self._are_groups(given["index"])
        if record.target is aten.sum.dim_IntList and list(given["dim"]) == [0]:
            marks = self._made_by(record.args[0])
            return (
                marks is not None
                and marks.target is aten.one_hot.default
                and self._are_groups(marks.args[0])
            )
        return False

    def _adds_ones(self, given: dict[str, Any], count: int) -> bool:
        """Whether to so many zeros a one is added for each row."""
        base, each = (self._made_by(given[name]) for name in ("self", "src"))
        if base is None or each is None:
            return False
        shapes = given["self"].meta.shape, given["src"].meta.shape
        is_plain = base.target in _ZEROS and each.target in _ONES
        return is_plain and shapes == ((count,), (self.count,))

    def _are_groups(self, value: Value) -> bool:
        """Whether numbers are those of the groups, sorted or not, of whatever type and in whatever shape."""
        sorts = () if self.sort.target in _ARGSORTS else self.sort.outputs[:1]
        return self._root(value) in (self._root(self.groups), *sorts)

    def _root(self, value: Value) -> Value:
        """Return what a value was before it was cast and reshaped."""
        maker = self.makers.get(value)
        while maker is not None and maker.target in _CASTS | {aten.reshape.default}:
            value = maker.args[0]
            maker = self.makers.get(value)
        return value

    def _made_by(self, value: Value) -> Record | None:
        """Return what made a value, before casts."""
        return self.makers.get(self._root(value))


def _sorts_groups(sort: Record) -> bool:
    groups = sort.args[0].meta
    return (
        groups.dim() == 1 and not groups.is_floating_point() and not sort.kwargs.get("descending")
    )


def _arguments(record: Record) -> dict[str, Any]:
    return named_arguments(record.target, record.args, record.kwargs)


_SPECIAL: dict[str, Callable[[_Rows, Record, dict[str, Any], Recorder], bool]] = {
    "aten.floor_divide": _Rows._divide, "aten.div.Tensor_mode": _Rows._divide, "aten.div.Scalar_mode": _Rows._divide,
    "aten.index.Tensor": _Rows._pick, "aten.index_select": _Rows._pick, "aten.index_put": _Rows._put,
    "aten.index_add": _Rows._add, "aten.histc": _Rows._count, "aten.argsort": _Rows._return,
    "aten.argsort.stable": _Rows._return, "aten.empty_like": _Rows._like, "aten.zeros_like": _Rows._like,
    **{name.removesuffix(".default"): _Rows._multiply for name in _PRODUCTS},
}  # fmt: skip
