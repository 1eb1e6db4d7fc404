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
NAMES = (
    "n_fft", "hop_length", "win_length", "window", "center", "normalized", "onesided", "length", "return_complex",
)  # fmt: skip


@contextlib.contextmanager
def traceable_istft() -> Iterator[None]:
    """Let the inverse transform of spectra without values be products, folds and quotients."""
    torch.istft = _inverse  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.istft = _plain


def _inverse(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return the sound of spectra ``b.. f t``."""
    asked = dict.fromkeys(NAMES) | {"center": True}
    asked |= dict(zip(NAMES, args, strict=False)) | kwargs
    is_traced = isinstance(input, (FakeTensor, FunctionalTensor))
    if not is_traced or asked["return_complex"] or asked["onesided"] is False:
        return _plain(input, *args, **kwargs)  # type: ignore[no-any-return]
    sound = _composed(input if input.dim() > 2 else input[None], asked)
    return sound if input.dim() > 2 else sound[0]


def _composed(spectra: Tensor, asked: dict[str, Any]) -> Tensor:
    n_fft, length, window = (asked[name] for name in ("n_fft", "length", "window"))
    width = asked["win_length"] or n_fft
    hop = asked["hop_length"] or width // 4
    norm = "ortho" if asked["normalized"] else "backward"
    frames = torch.fft.irfft(spectra.mT, n_fft, norm=norm)
    before = (n_fft - width) // 2
    window = frames.new_ones(width) if window is None else window
    window = F.pad(window, (before, n_fft - width - before))
    count = frames.shape[-2]
    whole = n_fft + hop * (count - 1)
    sound = _laid(frames * window, whole, hop)
    weights = _laid(window.square().expand(1, count, n_fft), whole, hop)
    start = n_fft // 2 if asked["center"] else 0
    end = whole - start if length is None else start + length
    sound = sound[..., start:end] / weights[..., start:end]
    return F.pad(sound, (0, max(0, end - whole)))


def _laid(frames: Tensor, length: int, hop: int) -> Tensor:
    """Return the sums of frames ``b t n`` that begin ``hop`` after each other, ``b length``."""
    return F.fold(frames.mT, (1, length), (1, frames.shape[-1]), stride=(1, hop)).flatten(1)
