"""Example calls of decompositions, diagonals and Fourier transforms."""

from __future__ import annotations

from shardwright.verbs.examples.notation import C, F, P, U, call, every, fixed

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
    **every("linalg_solve_triangular.default", call(P(4, 3, 3), F(4, 3, 2), upper=False)),
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
