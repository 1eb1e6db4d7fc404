"""Decompositions of matrices, their diagonals, and Fourier transforms: what is around them splits."""

from __future__ import annotations

from shardwright.operators.splitting.iteration import Iteration
from shardwright.operators.splitting.rules.notation import equation
from shardwright.operators.splitting.rules.signature import (
    NotUnderstood,
    Rule,
    Signature,
    blank,
    family,
    numbered,
    space,
    without,
)


def diagonal(call: Signature) -> Iteration:
    """Read a diagonal of two dims, which becomes a new last one; all others split."""
    rank = len(call.inputs[0])
    dims = {call.tensor_dim("dim1", 0), call.tensor_dim("dim2", 1)}
    names = numbered(rank)
    return space(call, [blank(names, dims)], [(*without(names, dims), "")], linear=(0,))


def diagonal_matrix(call: Signature) -> Iteration:
    """Write the last dim on the diagonal of two new ones; all others split."""
    names = numbered(len(call.inputs[0]) - 1)
    result = list(names)
    rank = len(names) + 2
    dims = sorted({call.tensor_dim("dim1", -2, rank=rank), call.tensor_dim("dim2", -1, rank=rank)})
    for dim in dims:
        result.insert(dim, "")
    return space(call, [(*names, "")], [tuple(result)], linear=(0,))


def written_diagonal(call: Signature) -> Iteration:
    """Write the last dim of another tensor on a diagonal of two dims; all others split."""
    names = numbered(len(call.inputs[0]))
    dims = {call.tensor_dim("dim1", 0), call.tensor_dim("dim2", 1)}
    whole = blank(names, dims)
    return space(call, [whole, (*without(names, dims), "")], [whole], linear=(0, 1))


def solution(call: Signature) -> Iteration:
    """Solve with matrices for columns, or for a vector each; factors beside may be of the matrix or turned,
    as is quicker for so many columns."""
    has_factors, is_vector = len(call.outputs) > 1, len(call.inputs[1]) < len(call.inputs[0])
    columns = "" if is_vector else " _" if has_factors else " k"
    factors = ", b.. _ _, b.. _, b.." if has_factors else ""
    return equation(f"A b.. _ _, B b.. _{columns} -> b.. _{columns}{factors}")(call)


def solution_by_factors(call: Signature) -> Iteration:
    """Solve with factors for columns, or for rows where these stand left of the matrix."""
    right = "B b.. k _ -> b.. k _" if call.attribute("left") is False else "B b.. _ k -> b.. _ k"
    return equation(f"LU b.. _ _, pivots b.. _, {right}", linear="B")(call)


def matrix_norm(call: Signature) -> Iteration:
    """Fold the two dims of matrices whole."""
    rank = len(call.inputs[0])
    dims = {dim % rank for dim in call.integers("dim") or (-2, -1)}
    names = blank(numbered(rank), dims)
    return space(call, [names], [without(names, dims, keepdim=call.attribute("keepdim") is True)])


def transform(call: Signature) -> Iteration:
    """Transform along some dims, given or all; the others split."""
    rank = len(call.inputs[0])
    name = call.kind.split(".")[1]
    by_default = (-1,) if call.attribute("dim", ()) == () else ()
    if name.endswith("2"):
        by_default = (-2, -1)
    elif name.endswith(("n", "shift")):
        sizes = call.integers("s")
        by_default = tuple(range(rank - len(sizes) if sizes else 0, rank))
    dims = call.integers("dim") or by_default
    if not dims:
        raise NotUnderstood(f"{call.kind} of unknown dims")
    names = blank(numbered(rank), {dim % rank for dim in dims})
    return space(call, [names], [names], linear=(0,))


def triangular_solution(call: Signature) -> Iteration:
    """Solve for every matrix by itself, and for every column of what is on the right (row, where that is on the left)."""
    columns = "_ c" if call.attribute("left", True) else "c _"
    return equation(f"self b.. _ _, B b.. {columns} -> b.. {columns}", linear="B")(call)


RULES: dict[str, Rule] = {
    **family(
        equation("self b.. _ _ -> b.. _ _"),
        """
        linalg_cholesky.default cholesky.default cholesky_inverse.default matrix_exp.default
        linalg_matrix_exp.default inverse.default linalg_matrix_power.default
        linalg_pinv.default linalg_pinv.atol_rtol_float
        """,
    ),
    **family(solution, "linalg_solve.default _linalg_solve_ex.default"),
    "aten.linalg_lu_solve.default": solution_by_factors,
    **family(matrix_norm, "linalg_matrix_norm.default linalg_matrix_norm.str_ord"),
    "aten.trace.default": equation("self _ _ ->", linear="self"),
    "aten.linalg_eigvalsh.default": equation("self b.. _ _ -> b.. _"),
    "aten.linalg_svdvals.default": equation("A b.. _ _ -> b.. _"),
    **family(equation("self b.. _, window _ -> b.. _ _"), "stft.default stft.center"),
    "aten.linalg_cholesky_ex.default": equation("self b.. _ _ -> b.. _ _, b.."),
    "aten.cholesky_solve.default": equation("self b.. _ _, input2 b.. _ _ -> b.. _ _"),
    "aten.linalg_solve_triangular.default": triangular_solution,
    "aten.linalg_inv.default": equation("A b.. _ _ -> b.. _ _"),
    "aten.linalg_eigh.default": equation("self b.. _ _ -> b.. _, b.. _ _"),
    "aten.linalg_det.default": equation("A b.. _ _ -> b.."),
    **family(equation("self b.. _ _ -> b.."), "det.default logdet.default"),
    "aten.linalg_slogdet.default": equation("A b.. _ _ -> b.., b.."),
    "aten._linalg_det.default": equation("A b.. _ _ -> b.., b.. _ _, b.. _"),
    "aten._linalg_slogdet.default": equation("A b.. _ _ -> b.., b.., b.. _ _, b.. _"),
    **family(
        equation("A b.. _ _ -> b.. _ _, b.. _, b.. _ _"), "_linalg_svd.default linalg_svd.default"
    ),
    "aten.linalg_qr.default": equation("A b.. _ _ -> b.. _ _, b.. _ _"),
    "aten.linalg_lu_factor_ex.default": equation("A b.. _ _ -> b.. _ _, b.. _, b.."),
    "aten.diagonal.default": diagonal,
    "aten.diag_embed.default": diagonal_matrix,
    "aten.diagonal_scatter.default": written_diagonal,
    **family(
        transform,
        """
        fft_fft.default fft_ifft.default fft_rfft.default fft_irfft.default fft_hfft.default
        fft_fft2.default fft_ifft2.default fft_rfft2.default fft_irfft2.default
        fft_fftn.default fft_ifftn.default fft_rfftn.default fft_irfftn.default
        fft_fftshift.default fft_ifftshift.default
        """,
    ),
}
