"""Operators that are spellings of one thing, and those that say nothing about values."""

from __future__ import annotations

from torch import fx

from shardwright.runtime.capture import operators
from shardwright.runtime.capture.record import aten

UNCHECKED = "what forward checks of its values is not checked again in training"
CHECKS = frozenset(
    {"aten._assert_async.msg", "aten._assert_async.default", "aten._assert_scalar.default"}
)
SKIPPED = CHECKS | frozenset(
    {
        "aten._assert_tensor_metadata.default",
        "aten.sym_constrain_range_for_size.default", "aten.sym_constrain_range.default",
        "aten._linalg_check_errors.default",
    }
)  # fmt: skip
RESHAPES = frozenset(
    {
        aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints,
        aten.unflatten.int, aten.view_as.default, aten.reshape_as.default,
        aten._reshape_alias.default,
    }
)  # fmt: skip
CASTS = frozenset(
    {
        aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.to.other, aten._to_copy.default,
        aten.type_as.default,
    }
)  # fmt: skip
COPIES = frozenset(
    {
        aten.clone.default,
        aten.lift_fresh_copy.default,
        aten.lift_fresh.default,
        aten.contiguous.default,
    }
)
# Operators that only mark their argument, to be changed when it is next used, and those that do it: a
# mark would be lost where a tensor is sent, or taken for no change at all. And those that take only what lies in
# order, which a shard may not.
PHYSICAL = {
    aten._conj.default: aten.conj_physical.default,
    aten.conj.default: aten.conj_physical.default,
    aten._neg_view.default: aten.neg.default,
    aten.view_as_complex.default: operators.as_complex,
    aten.kron.default: operators.kron,
    aten.max_unpool2d.default: operators.max_unpool2d,
}
ADJOINT = frozenset({aten.mH.default, aten.matrix_H.default, aten.adjoint.default})
# Losses whose reduction is the plain mean or sum of a result by element or by sample.
ELEMENTWISE_LOSSES = frozenset(
    {
        aten.mse_loss.default, aten.l1_loss.default, aten.smooth_l1_loss.default,
        aten.huber_loss.default, aten.binary_cross_entropy.default,
        aten.binary_cross_entropy_with_logits.default, aten.soft_margin_loss.default,
        aten.kl_div.default, aten.poisson_nll_loss.default, aten.triplet_margin_loss.default,
        aten.cosine_embedding_loss.default, aten.margin_ranking_loss.default,
        aten.hinge_embedding_loss.default, aten.multi_margin_loss.default,
        aten.multilabel_margin_loss.default,
    }
)  # fmt: skip
NLL = frozenset({aten.nll_loss_nd.default, aten.nll_loss.default, aten.nll_loss2d.default})


def only_checked(graph: fx.Graph) -> frozenset[fx.Node]:
    """Return the nodes whose results serve nothing but checks of values, which the graph leaves out."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "call_function" and (
            str(node.target) in SKIPPED or (node.users and found.issuperset(node.users))
        ):
            schema = getattr(node.target, "_schema", None)
            if str(node.target) in SKIPPED or schema is None or not schema.is_mutable:
                found.add(node)
    return frozenset(found)
