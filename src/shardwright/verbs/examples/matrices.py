"""Example calls of decompositions, diagonals and Fourier transforms."""

from __future__ import annotations

from shardwright.verbs.examples.notation import C, F, P, U, V, call, every, fixed

EXAMPLES = {
    **every(
        "linalg_cholesky.default cholesky.default linalg_cholesky_ex.default",
        call(P(4, 3, 3)),
        call(P(2, 4, 3, 3)),
        call(P(3, 3)),
        fixed((1,), call(U(4, 6, 1, 1))),
        fixed((1,), call(U(4, 1, 1), upper=True)),
    ),
    **every(
        "cholesky_inverse.default",
        call(P(4, 3, 3)),
        fixed((1,), call(U(4, 6, 1, 1))),
        fixed((1,), call(U(4, 1, 1), upper=True)),
    ),
    **every(
        "matrix_exp.default linalg_matrix_exp.default inverse.default",
        call(P(4, 3, 3)),
    ),
    **every("linalg_eigvalsh.default linalg_svdvals.default", call(P(4, 3, 3))),
    **every(
        "linalg_solve.default _linalg_solve_ex.default",
        call(P(4, 3, 3), F(4, 3, 2)),
        call(P(4, 3, 3), F(4, 3)),
    ),
    **every("stft.default stft.center", fixed((64,), call(F(6, 64), 16, return_complex=True))),
    **every("cholesky_solve.default", call(F(4, 3, 2), P(4, 3, 3))),
    **every(
        "linalg_solve_triangular.default",
        call(P(4, 3, 3), F(4, 3, 2), upper=False),
        call(P(4, 3, 3), F(4, 6, 3), upper=True, left=False),
    ),
    **every(
        "linalg_inv.default linalg_det.default logdet.default linalg_slogdet.default",
        call(P(4, 3, 3)),
    ),
    **every(
        "_linalg_det.default _linalg_slogdet.default linalg_lu_factor_ex.default linalg_qr.default",
        call(P(4, 3, 3)),
    ),
    **every("linalg_svd.default _linalg_svd.default", call(P(4, 3, 3), False)),
    **every(
        "diagonal.default",
        call(F(4, 6, 6), 0, -2, -1),
        call(F(6, 8)),
        call(F(4, 6, 8, 2), 1, 2, 0),
        call(F(4, 6, 6), 0, 1, 2),
        call(F(6, 4, 8), 1, -1, 0),
        call(F(4, 6)),
    ),
    **every("linalg_matrix_power.default", call(P(4, 3, 3), 3), call(P(2, 4, 3, 3), 2)),
    **every("det.default linalg_eigh.default", call(P(4, 3, 3)), call(P(2, 4, 3, 3))),
    **every(
        "diagonal_scatter.default",
        call(F(4, 6, 6), F(4, 6), 0, -2, -1),
        call(F(6, 4, 8), F(4, 6), 1, 0, 2),
    ),
    **every(
        "linalg_pinv.atol_rtol_float",
        call(F(4, 6, 3)),
        call(F(2, 4, 3, 6), rtol=1e-9),
        call(P(4, 3, 3), hermitian=True),
    ),
    **every("linalg_pinv.default", call(F(4, 6, 3), 1e-9)),
    **every(
        "linalg_lu_solve.default",
        call(U(4, 3, 3), V(4, 3), F(4, 3, 2)),
        call(U(4, 3, 3), V(4, 3), F(4, 2, 3), left=False),
        call(U(3, 3), V(3), F(3, 2), adjoint=True),
    ),
    **every(
        "linalg_matrix_norm.default",
        call(F(4, 6, 8), 1),
        call(F(4, 6, 8), 2, [0, 1], True),
    ),
    **every(
        "linalg_matrix_norm.str_ord",
        call(F(4, 6, 8)),
        call(F(2, 4, 6, 8), "nuc", [1, -1]),
    ),
    **every("trace.default", call(F(4, 6)), call(F(6, 6))),
    **every("diag_embed.default", call(F(4, 6)), call(F(4, 2, 6), 0, 0, 2)),
    **every(
        "fft_fft.default fft_ifft.default fft_rfft.default fft_irfft.default fft_hfft.default",
        call(F(4, 6, 8)),
        call(F(4, 6, 8), None, 1, "ortho"),
    ),
    **every("fft_ifft.default", call(C(4, 6, 8), None, 0)),
    **every(
        "fft_fft2.default fft_ifft2.default fft_rfft2.default fft_irfft2.default",
        call(F(4, 6, 8)),
        call(F(4, 2, 6, 8), None, [1, 2]),
    ),
    **every(
        "fft_fftn.default fft_ifftn.default fft_rfftn.default fft_irfftn.default",
        call(F(4, 6, 8), None, [1, 2]),
        call(F(4, 6)),
    ),
    **every("fft_fftshift.default fft_ifftshift.default", call(F(4, 6, 8), [1]), call(F(4, 6))),
}
EXAMPLES["aten.fft_fftn.default"] += (call(F(4, 6, 8), [6, 8]),)
