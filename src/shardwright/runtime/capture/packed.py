"""Recurrences over packed sequences, as one operator on the padded ones and their lengths.

Packing sorts the samples by length and lays their steps one behind another, in a shape that depends on
values. Here what is packed stays padded until a recurrent layer runs over it, and the operator, which may
have some of the samples only, packs for itself.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, library, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn.utils import rnn

from shardwright.runtime.capture.record import Unsupported, aten

_LAYERS = {"LSTM": aten.lstm, "GRU": aten.gru, "RNN_TANH": aten.rnn_tanh, "RNN_RELU": aten.rnn_relu}
_operators = library.Library("shardwright", "FRAGMENT")
_operators.define(
    "packed_recurrence(Tensor input, Tensor lengths, Tensor[] hx, Tensor[] params, str mode, "
    "bool has_biases, int num_layers, bool bidirectional, bool batch_first) -> Tensor[]"
)
# These pack also where a model has imported them by name.
_pack, _pad = (
    types.FunctionType(one.__code__, one.__globals__, one.__name__, one.__defaults__)
    for one in (rnn.pack_padded_sequence, rnn.pad_packed_sequence)
)


def packed_recurrence(
    input: Tensor,
    lengths: Tensor,
    hx: list[Tensor],
    params: list[Tensor],
    mode: str = "LSTM",
    has_biases: bool = True,
    num_layers: int = 1,
    bidirectional: bool = False,
    batch_first: bool = False,
) -> tuple[Tensor, ...]:
    """Return the results and last states of a recurrence over sequences of ``lengths``; results are zero
    behind these."""
    given = (params, has_biases, num_layers, 0.0, False, bidirectional)
    layer = _LAYERS[mode]
    if input.is_meta:
        return tuple(layer.input(input, hx if mode == "LSTM" else hx[0], *given, batch_first))
    packed = _pack(input, lengths.cpu(), batch_first, False)
    begun = [one.index_select(1, packed.sorted_indices) for one in hx]
    result, *states = layer.data(
        packed.data, packed.batch_sizes, begun if mode == "LSTM" else begun[0], *given
    )
    total = input.shape[1 if batch_first else 0]
    padded, _ = _pad(packed._replace(data=result), batch_first, 0.0, total)
    return padded, *(one.index_select(1, packed.unsorted_indices) for one in states)


@library.register_fake("shardwright::packed_recurrence", lib=_operators)
def _fake_results(
    input: Tensor, lengths: Tensor, hx: list[Tensor], params: Any, *given: Any
) -> Any:
    *_, bidirectional, _batch_first = given
    width = hx[0].shape[2] * (1 + bidirectional)
    return [input.new_empty(*input.shape[:2], width), *(torch.empty_like(one) for one in hx)]


class Packed(rnn.PackedSequence):
    """What was packed, while it is traced: ``data`` are the padded sequences, ``batch_sizes`` the lengths
    of all samples. Only recurrent layers and padding know it."""

    is_batch_first = False

    @staticmethod
    def of(padded: Tensor, lengths: Tensor, is_batch_first: bool) -> Packed:
        """Return padded sequences as packed ones."""
        made = tuple.__new__(Packed, (padded, lengths, None, None))
        made.is_batch_first = is_batch_first
        return made


def _packed(input: Tensor, lengths: Any, batch_first: bool, enforce_sorted: bool) -> Any:
    if not isinstance(input, (FakeTensor, FunctionalTensor)):
        return _pack(input, lengths, batch_first, enforce_sorted)
    if not isinstance(lengths, Tensor):
        raise Unsupported("sequences packed by lengths that are no tensor")
    return Packed.of(input, lengths, batch_first)


def _padded(
    sequence: Any, batch_first: bool, padding_value: float, total_length: int | None
) -> tuple[Tensor, Tensor]:
    if not isinstance(sequence, Packed):
        return _pad(sequence, batch_first, padding_value, total_length)
    padded, lengths = sequence.data, sequence.batch_sizes
    length = padded.shape[1 if sequence.is_batch_first else 0]
    if total_length is None:
        raise Unsupported(
            "packed sequences that are padded to the longest of a batch, whose length only values tell; give "
            f"pad_packed_sequence total_length={length}"
        )
    if padding_value != 0.0 or total_length != length:
        raise Unsupported("packed sequences that are padded to another length, or not with zeros")
    return padded if batch_first == sequence.is_batch_first else padded.transpose(0, 1), lengths


@contextlib.contextmanager
def traceable_packing() -> Iterator[None]:
    """Let sequences without values stay padded where they are packed."""
    codes = rnn.pack_padded_sequence.__code__, rnn.pad_packed_sequence.__code__
    forwards = [(kind, kind.forward) for kind in (nn.LSTM, nn.GRU, nn.RNN)]
    rnn.pack_padded_sequence.__code__ = _call_packed.__code__
    rnn.pad_packed_sequence.__code__ = _call_padded.__code__
    for kind, plain in forwards:
        kind.forward = _forward(plain)  # type: ignore[method-assign]
    try:
        yield
    finally:
        rnn.pack_padded_sequence.__code__, rnn.pad_packed_sequence.__code__ = codes
        for kind, plain in forwards:
            kind.forward = plain  # type: ignore[method-assign]


def _call_packed(input: Any, lengths: Any, batch_first: Any, enforce_sorted: Any) -> Any:
    from shardwright.runtime.capture.packed import _packed  # it runs among the globals of torch

    return _packed(input, lengths, batch_first, enforce_sorted)


def _call_padded(sequence: Any, batch_first: Any, padding_value: Any, total_length: Any) -> Any:
    from shardwright.runtime.capture.packed import _padded  # as above

    return _padded(sequence, batch_first, padding_value, total_length)


def _forward(plain: Any) -> Any:
    def forward(layer: Any, input: Any, hx: Any = None) -> Any:
        return _run(layer, input, hx) if isinstance(input, Packed) else plain(layer, input, hx)

    return forward


def _run(layer: Any, packed: Packed, hx: Any) -> Any:
    """Return what a recurrent layer makes of packed sequences."""
    if layer.proj_size or (layer.dropout and layer.training and layer.num_layers > 1):
        raise Unsupported("a recurrence over packed sequences with projections or dropout inside")
    padded, lengths = packed.data, packed.batch_sizes
    states = hx if isinstance(hx, (tuple, list)) else [hx]
    if hx is None:
        states = _zeros(layer, padded, padded.shape[0 if packed.is_batch_first else 1])
    result, *last = torch.ops.shardwright.packed_recurrence(
        padded, lengths, list(states), list(layer._flat_weights), layer.mode, layer.bias,
        layer.num_layers, layer.bidirectional, packed.is_batch_first,
    )  # fmt: skip
    return Packed.of(result, lengths, packed.is_batch_first), tuple(
        last
    ) if layer.mode == "LSTM" else last[0]


def _zeros(layer: Any, padded: Tensor, rows: int) -> list[Tensor]:
    """Return the states that a layer begins with where it is given none."""
    shape = (layer.num_layers * (1 + layer.bidirectional), rows, layer.hidden_size)
    return [padded.new_zeros(shape) for _ in range(1 + (layer.mode == "LSTM"))]
