"""Example batches of text with sounds among it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from shardwright.runtime.capture.mixed import Draw, Mixed, Noise, Others, first_of

# Frames of a sound where no config says how many a model takes: ten seconds, as such models are fed.
USUAL_FRAMES = 1000
_MASKS = ("input_features_mask", "feature_attention_mask")


class Recordings(Mixed):
    """What a model of text and sounds takes, as spectrograms that fill all frames."""

    sense = "audio"

    def __init__(self, config: Any) -> None:
        import transformers

        tasks = ("AutoModelForMultimodalLM", "AutoModelForSeq2SeqLM")
        known = (one for one in tasks if type(config) in getattr(transformers, one)._model_mapping)
        super().__init__(config, next(known))
        self.audio = first_of(config, "audio_config", "encoder_config")

    def _others(
        self, count: int, most: int, draw: Draw, noise: Noise
    ) -> Iterator[tuple[Others, int]]:
        """Yield spectrograms with their frames last, and with these first."""
        bins = first_of(self.audio, "num_mel_bins", "feature_size")
        positions = first_of(self.audio, "max_source_positions")
        frames = 2 * positions if positions else USUAL_FRAMES  # halved by the first convolutions
        window = 2 * first_of(self.audio, "n_window", default=1)
        frames = math.ceil(frames / window) * window
        masks = [
            name
            for name in _MASKS
            if name in self.takes and (name in self.asked or name == _MASKS[1])
        ]
        marks = {name: torch.ones(count, frames).long() for name in masks}
        for shape in ((count, bins, frames), (count, frames, bins)):
            yield {"input_features": noise(shape), **marks}, 0

    def _maker(self, model: Any) -> Any:
        """Return what makes features: where it has no name of its own, the tower, of whose results all are features."""
        inner = getattr(model, "model", model)
        found = getattr(inner, "get_audio_features", None)
        return found or inner.audio_tower.forward

    def _beside(self, batch: dict[str, Tensor], is_marked: Tensor) -> Others:
        """Return nothing else."""
        del batch, is_marked
        return {}
