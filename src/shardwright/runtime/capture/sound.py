"""``torch.istft`` as what it is composed of.

Torch asks of the windows' values whether they overlap everywhere, which no trace knows; a window that leaves a gap
divides by zero here instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

_plain: Any = torch.istft


@contextlib.contextmanager
def traceable_istft() -> Iterator[None]:
    """Let the inverse transform of spectra without values be products, folds and quotients."""
    torch.istft = _inverse  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.istft = _plain


def _inverse(
    input: Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Tensor | None = None,
    center: bool = True,
    normalized: bool = False,
    onesided: bool | None = None,
    length: int | None = None,
    return_complex: bool = False,
) -> Tensor:
    """Return the sound of spectra ``b.. f t``."""
    given = n_fft, hop_length, win_length, window, center, normalized, onesided, length
    if not isinstance(input, (FakeTensor, FunctionalTensor)) or return_complex or onesided is False:
        return _plain(input, *given, return_complex)  # type: ignore[no-any-return]
    width = win_length or n_fft
    hop = hop_length or width // 4
    spectra = input if input.dim() > 2 else input[None]
    frames = torch.fft.irfft(spectra.mT, n_fft, norm="ortho" if normalized else "backward")
    if window is None:
        window = frames.new_ones(width)
    before = (n_fft - width) // 2
    window = F.pad(window, (before, n_fft - width - before))
    count = frames.shape[-2]
    whole = n_fft + hop * (count - 1)
    sound = _laid(frames * window, whole, hop)
    weights = _laid(window.square().expand(1, count, n_fft), whole, hop)
    start = n_fft // 2 if center else 0
    end = whole - start if length is None else start + length
    sound = sound[..., start:end] / weights[..., start:end]
    sound = F.pad(sound, (0, max(0, end - whole)))
    return sound if input.dim() > 2 else sound[0]


def _laid(frames: Tensor, length: int, hop: int) -> Tensor:
    """Return the sums of frames ``b t n`` that begin ``hop`` after each other, ``b length``."""
    return F.fold(frames.mT, (1, length), (1, frames.shape[-1]), stride=(1, hop)).flatten(1)
