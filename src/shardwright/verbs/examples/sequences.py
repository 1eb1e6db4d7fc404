"""Example calls of attention and recurrent layers."""

from __future__ import annotations

from shardwright.verbs.examples.notation import B, F, L, call, every, fixed

EXAMPLES = {
    **every(
        "scaled_dot_product_attention.default",
        call(F(2, 4, 6, 8), F(2, 4, 6, 8), F(2, 4, 6, 8), is_causal=True),
        call(F(2, 4, 6, 8), F(2, 4, 3, 8), F(2, 4, 3, 5), B(2, 1, 6, 3)),
        call(F(2, 4, 6, 8), F(2, 2, 6, 8), F(2, 2, 6, 8), F(6, 6), enable_gqa=True),
        call(F(2, 4, 6, 8), F(2, 1, 6, 8), F(2, 1, 6, 8), enable_gqa=True, scale=0.3),
        call(F(4, 6, 8), F(4, 3, 8), F(4, 3, 8), F(4, 1, 3)),
        call(F(4, 8), F(6, 8), F(6, 8)),
    ),
    **every(
        "lstm_cell.default",
        fixed((2, 3, 8), call(F(4, 3), [F(4, 2), F(4, 2)], F(8, 3), F(8, 2), F(8), F(8))),
    ),
    **every(
        "gru_cell.default", fixed((2, 3, 6), call(F(4, 3), F(4, 2), F(6, 3), F(6, 2), F(6), F(6)))
    ),
    **every(
        "rnn_tanh_cell.default rnn_relu_cell.default",
        fixed((2, 3), call(F(4, 3), F(4, 2), F(2, 3), F(2, 2))),
    ),
    **every(
        "lstm.input",
        fixed(
            (2, 3, 8),
            call(
                F(4, 6, 3),
                [F(1, 4, 2), F(1, 4, 2)],
                [F(8, 3), F(8, 2), F(8), F(8)],
                True,
                1,
                0.0,
                True,
                False,
                True,
            ),
        ),
        fixed(
            (2, 3, 8),
            call(
                F(6, 4, 3),
                [F(2, 4, 2), F(2, 4, 2)],
                [F(8, 3), F(8, 2), F(8, 3), F(8, 2)],
                False,
                1,
                0.0,
                True,
                True,
                False,
            ),
        ),
    ),
    **every(
        "gru.input",
        fixed(
            (2, 3, 6),
            call(F(4, 6, 3), F(1, 4, 2), [F(6, 3), F(6, 2)], False, 1, 0.0, True, False, True),
        ),
    ),
    **every(
        "rnn_tanh.input rnn_relu.input",
        fixed(
            (2, 3),
            call(F(6, 4, 3), F(1, 4, 2), [F(2, 3), F(2, 2)], False, 1, 0.0, True, False, False),
        ),
    ),
    "shardwright.packed_recurrence": (
        fixed(
            (2, 3, 4, 6, 8),  # as many samples as lengths
            call(
                F(4, 6, 3),
                L(6, 5, 6, 2),
                [F(1, 4, 2), F(1, 4, 2)],
                [F(8, 3), F(8, 2), F(8), F(8)],
                "LSTM",
                batch_first=True,
            ),
        ),
        fixed(
            (2, 3, 4, 6),
            call(
                F(6, 4, 3), L(6, 5, 6, 2), [F(1, 4, 2)], [F(6, 3), F(6, 2)], "GRU", has_biases=False
            ),
        ),
    ),
}
