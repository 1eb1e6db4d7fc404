"""Operators that PyTorch composes of others and that have no rule of their own: second names (``arccos``, ``less_equal``,
``moveaxis``), and what stacks, turns, cuts or multiplies by others (``hstack``, ``fliplr``, ``diag``, ``multi_dot``)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from shardwright.runtime.capture.record import aten

NAMES = """
    arccos arccosh arcsin arcsinh arctan arctan2 arctanh atleast_1d atleast_2d atleast_3d
    chain_matmul column_stack cumulative_trapezoid diag diagflat dsplit dstack fft_ihfft
    fft_ihfft2 fft_ihfftn fix fliplr flipud float_power gradient greater greater_equal hsplit
    hstack isreal less less_equal linalg_lu_factor linalg_matmul linalg_multi_dot linalg_vecdot
    moveaxis msort narrow not_equal row_stack special_digamma special_erfc special_erfinv
    special_exp2 special_expm1 special_gammaln special_i0 special_log1p special_log_softmax
    special_logit special_ndtr special_psi special_round special_sinc special_softmax
    special_xlogy trapz vander vsplit vstack
"""
_SPLITS = frozenset({"aten.narrow.default"})  # with a rule of its own


def composed() -> frozenset[Any]:
    """Return the overloads that are taken apart."""
    packets = [getattr(aten, name) for name in NAMES.split()]
    every = [getattr(packet, name) for packet in packets for name in packet.overloads()]
    return frozenset(
        one
        for one in every
        if not one._schema.is_mutable and "dimname" not in one._overloadname
        and "out" not in one._overloadname and str(one) not in _SPLITS
    )  # fmt: skip


COMPOSED = composed()


def parts(target: Any, args: Any, kwargs: Any) -> fx.GraphModule:
    """Return a graph of the operators that a call is composed of: a placeholder for every tensor among its arguments, in
    their order."""
    leaves, form = pytree.tree_flatten((list(args), kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def run(*tensors: Tensor) -> Any:
        given = dict(zip(places, tensors, strict=True))
        filled = [given.get(place, leaf) for place, leaf in enumerate(leaves)]
        args, kwargs = pytree.tree_unflatten(filled, form)
        return target.decompose(*args, **kwargs)

    with torch.no_grad():
        found = make_fx(run)(*(leaves[place] for place in places))
    for node in found.graph.nodes:  # values never change: a copy of a view is that view
        if str(node.target).startswith("aten.diagonal_copy"):
            node.target = aten.diagonal.default
    return found
