"""Products of rows whose dims were merged for them and are separated again, on the dims as they were.

``nn.MultiheadAttention`` writes ``t b d`` as rows for its last projection. Of merged rows only the
first factor can be split, here the sequence: samples could be cut neither in space nor in
microbatches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from shardwright.runtime.capture.record import Record, Recorder, Value, aten, tensors_in


def keep_dims(records: Sequence[Record], results: Iterable[Value]) -> list[Record]:
    """Rewrite every linear layer between a reshape to rows and the reshape back; linear in records."""
    makers = {value: record for record in records for value in record.outputs}
    uses = Counter(
        value
        for record in records
        for value in tensors_in([record.args, list(record.kwargs.values())])
    )
    uses.update(results)
    return [one for record in records for one in _unmerged(record, makers, uses) or [record]]


def _unmerged(back: Record, makers: dict[Value, Record], uses: Counter[Value]) -> list[Record]:
    """Return the product whose result ``back`` reshapes, on the dims that ``back`` makes; nothing
    where it is none on merged rows."""
    if back.target is not aten.reshape.default:
        return []
    product = makers.get(back.args[0])
    if product is None or product.target is not aten.linear.default or uses[back.args[0]] > 1:
        return []
    merge = makers.get(product.args[0])
    if merge is None or merge.target is not aten.reshape.default:
        return []
    shape, made = back.outputs[0].meta.shape, back.args[0].meta.shape
    if len(shape) < 3 or shape[-1] != made[-1]:
        return []
    before = merge.args[0]
    recorder = Recorder(node_name=product.name, path=product.path)
    with torch.set_grad_enabled(back.outputs[0].meta.requires_grad):
        inputs = [*shape[:-1], product.args[0].meta.shape[-1]]
        apart = recorder.emit(aten.reshape.default, before, inputs)
        recorder.emit(product.target, apart, *product.args[1:], **product.kwargs)
    recorder.records[-1].outputs = back.outputs
    return recorder.records
