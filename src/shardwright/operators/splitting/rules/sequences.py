"""Attention and recurrent layers."""

from __future__ import annotations

from dataclasses import replace

from shardwright.operators.splitting.iteration import Iteration
from shardwright.operators.splitting.rules.notation import equation
from shardwright.operators.splitting.rules.signature import (
    Names,
    NotUnderstood,
    Rule,
    Signature,
    broadcast,
    family,
    leading,
    space,
)


def attention(call: Signature) -> Iteration:
    """Split batch ``b``, heads ``h`` and queries ``q``; a causal mask must know where queries begin.

    With grouped queries a piece of the heads takes the key and value heads that belong to it; a
    single key head is shared by all pieces.
    """
    query, key, value = call.inputs[:3]
    full = (*query[:-1], value[-1])
    if call.outputs[0] != full or len({len(query), len(key), len(value)}) > 1:
        raise NotUnderstood("broadcast attention")
    batch = _batch_names(len(query) - 2)
    names = (*batch, "q", "")
    inputs = [names, _of_keys(query, key, batch), _of_keys(query, value, batch)]
    if "attn_mask" in call.names:
        inputs.append(broadcast(call.shape_of("attn_mask"), names, (*query[:-1], key[-2])))
    iteration = space(call, inputs, [names])
    is_causal = call.attribute("is_causal") is True and "q" in iteration.outputs[0]
    return replace(iteration, offset="q") if is_causal else iteration


def _batch_names(rank: int) -> Names:
    return (*leading(rank - 1), "h") if rank > 1 else leading(rank)


def _of_keys(query: tuple[int, ...], key: tuple[int, ...], batch: Names) -> Names:
    """Name the dims of keys or values; one that is shared by all queries lacks the name."""
    sizes = zip(batch, query[:-2], key[:-2], strict=True)
    shared = ["" if keys == 1 and queries > 1 else name for name, queries, keys in sizes]
    return (*shared, "", "")


def recurrent(call: Signature) -> Iteration:
    """Split the batch; states are ``layer batch hidden``."""
    data = call.inputs[0]
    if len(data) != 3:
        raise NotUnderstood("an unbatched or packed sequence")
    rows: Names = ("b", "", "") if call.attribute("batch_first") is True else ("", "b", "")
    state = ("", "b", "")
    inputs = [
        rows if at == 0
        else state if name.startswith("hx")
        else ("b",) if name == "lengths"
        else ("",) * len(call.inputs[at])
        for at, name in enumerate(call.names)
    ]  # fmt: skip
    outputs = [rows, *([state] * (len(call.outputs) - 1))]
    return space(call, inputs, outputs)


_CELL = "input b _, hx b _, w_ih _ _, w_hh _ _, b_ih _, b_hh _ -> b _"
_LSTM_CELL = _CELL.replace("hx b _", "hx.0 b _, hx.1 b _") + ", b _"

RULES: dict[str, Rule] = {
    "aten.scaled_dot_product_attention.default": attention,
    **family(recurrent, "lstm.input gru.input rnn_tanh.input rnn_relu.input"),
    "shardwright.packed_recurrence": recurrent,
    **family(equation(_CELL), "gru_cell.default rnn_tanh_cell.default rnn_relu_cell.default"),
    "aten.lstm_cell.default": equation(_LSTM_CELL),
}
