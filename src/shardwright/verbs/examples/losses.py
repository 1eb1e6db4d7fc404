"""Example calls of losses."""

from __future__ import annotations

from shardwright.verbs.examples.notation import F, I, K, L, U, call, every, fixed

EXAMPLES = {
    **every("poisson_nll_loss.default", call(F(4, 6), K(4, 6), True, False, 1e-8, 2)),
    **every(
        "mse_loss.default l1_loss.default smooth_l1_loss.default huber_loss.default",
        call(F(4, 6), F(4, 6)),
        call(F(4, 6), F(4, 6), 0),
        call(F(4, 6), F(4, 6), 2),
    ),
    **every(
        "binary_cross_entropy.default", call(U(4, 6), U(4, 6)), call(U(4, 6), U(4, 6), K(6), 0)
    ),
    **every(
        "binary_cross_entropy_with_logits.default",
        call(F(4, 6), U(4, 6)),
        call(F(4, 6), U(4, 6), K(4, 1), K(6), 2),
    ),
    **every("soft_margin_loss.default", call(F(4, 6), K(4, 6)), call(F(4, 6), K(4, 6), 2)),
    **every("kl_div.default", call(F(4, 6), U(4, 6)), call(F(4, 6), F(4, 6), 2, log_target=True)),
    **every(
        "cross_entropy_loss.default",
        call(F(4, 6), I(4)),
        call(F(4, 6), I(4), None, 0),
        call(F(4, 6, 2), I(4, 2), K(6), 2, 3),
        call(F(4, 6), U(4, 6), None, 2, label_smoothing=0.1),
    ),
    **every("triplet_margin_loss.default", call(F(4, 6), F(4, 6), F(4, 6), reduction=0)),
    **every("cosine_embedding_loss.default", call(F(4, 6), F(4, 6), K(4), 0.1, 0)),
    **every("margin_ranking_loss.default", call(F(4), F(4), K(4), 0.1, 0)),
    **every("hinge_embedding_loss.default", call(F(4, 6), K(4, 6), 1.0, 0)),
    **every("multi_margin_loss.default", call(F(4, 6), I(4), reduction=0)),
    **every("multilabel_margin_loss.default", call(F(4, 6), I(4, 6), 0)),
    **every("nll_loss.default", call(F(4, 6), I(4), K(6), 2)),
    **every(
        "nll_loss_nd.default", call(F(4, 6, 2), I(4, 2), None, 2), call(F(4, 6), I(4), None, 0)
    ),
    **every("nll_loss2d.default", call(F(4, 6, 2, 2), I(4, 2, 2), None, 2)),
    "shardwright.token_cross_entropy_sum": (
        call(F(4, 6, 8), I(4, 6)),
        call(F(2, 4, 6), I(2, 4), K(6), 3),
        call(F(4, 6), I(4), label_smoothing=0.1),
    ),
    "shardwright.cross_entropy_sum": (
        call(F(8, 6), I(8)),
        call(F(4, 6, 2), I(4, 2), K(6), 3),
        call(F(6), I()),
        call(F(4, 6), U(4, 6), label_smoothing=0.1),
    ),
    "shardwright.vocabulary_logsumexp": (
        fixed([4, 6, 24], call(F(4, 6, 24), 4)),
        fixed([4, 12], call(F(4, 12), 3)),
    ),
    "shardwright.vocabulary_cross_entropy_sum": (
        fixed([2, 4, 6, 8], call(F(4, 6, 8), I(4, 6), K(4, 6, 4), classes=8)),
        fixed([2, 4, 6, 8], call(F(4, 6, 8), I(4, 6), K(4, 6, 2), K(8), 3, 0.1, 8)),
    ),
    "shardwright.ctc_losses": (
        fixed(
            [6, 4, 5, 2], call(F(6, 4, 5), I(4, 2, high=4), L(6, 5, 6, 4), L(2, 1, 2, 2), 4, True)
        ),
    ),
    "shardwright.nll_sum": (call(F(8, 6), I(8)), call(F(4, 6, 2), I(4, 2), K(6), 3)),
    "shardwright.count_targets": (call(I(8), None, 3), call(I(4, 6), K(6))),
    "shardwright.count_rows": (call(U(8, 6), 6), call(U(8, 6, 2), 6), call(K(6), 6)),
    "shardwright.update_running": (call(K(6), K(6), F(1, 6, 1), F(1, 6, 1), 0.1, 1.5),),
    "shardwright.increment": (call(K(), 1),),
    "shardwright.assign": (call(K(4), F(4)),),
}
