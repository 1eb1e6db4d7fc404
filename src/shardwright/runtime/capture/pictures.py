"""Example batches of text with images among it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from shardwright.runtime.capture.mixed import Draw, Mixed, Noise, Others, first_of


class Pictures(Mixed):
    """What a model of text and images takes, of the size that its config names."""

    sense = "image"

    def __init__(self, config: Any) -> None:
        super().__init__(config, "AutoModelForImageTextToText")
        self.vision = config.vision_config
        self.channels = first_of(self.vision, "in_channels", "num_channels", "in_chans", default=3)

    def _others(
        self, count: int, most: int, draw: Draw, noise: Noise
    ) -> Iterator[tuple[Others, int]]:
        """Yield images in patches, in tiles, as they are, and as a row of one for each sample; where asked for with
        their sizes, marks of what is no padding, and words that are read with them."""
        if "image_grid_thw" in self.takes:
            yield from self._patches(count, most, noise)
        elif "spatial_shapes" in self.takes or "image_position_ids" in self.takes:
            yield self._packed(count, most, noise), 0
        elif hasattr(self.config, "image_grid_pinpoints"):
            yield self._tiled(count, noise), 0
        else:
            yield from self._whole(count, self._words(count, most, draw), noise)

    def _whole(self, count: int, words: Others, noise: Noise) -> Iterator[tuple[Others, int]]:
        size = getattr(self.vision, "image_size", 224)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        pixels = noise((count, self.channels, height, width))
        if self._wants("image_sizes"):
            words = {**words, "image_sizes": torch.tensor([[height, width]] * count)}
        yield {"pixel_values": pixels, **words}, 0
        row = {"pixel_values": pixels.unsqueeze(1), **words}
        if "pixel_attention_mask" in self.takes:
            row["pixel_attention_mask"] = torch.ones(count, 1, height, width).long()
        yield row, 0

    def _words(self, count: int, most: int, draw: Draw) -> Others:
        """Return words for a model that reads an image by them."""
        if "qformer_input_ids" not in self.takes:
            return {}
        reader = self.config.qformer_config
        length = min(most, reader.max_position_embeddings)
        return {"qformer_input_ids": draw((count, length), reader.vocab_size, 3)}

    def _wants(self, name: str) -> bool:
        """Whether the model makes no features of an image without an argument."""
        parameter = self.asked.get(name)
        return parameter is not None and parameter.default is inspect.Parameter.empty

    def _patches(self, count: int, most: int, noise: Noise) -> Iterator[tuple[Others, int]]:
        """Yield the patches of all images behind each other, with their grids: as rows of numbers, and as small images."""
        patch, merged = (
            self.vision.patch_size,
            first_of(self.vision, "spatial_merge_size", default=1),
        )
        frames = first_of(self.vision, "temporal_patch_size", default=1)
        wide = first_of(self.vision, "image_size", default=224) // patch // merged
        side = max(1, min(wide, math.isqrt(most))) * merged
        rows = noise((count * side * side, self.channels * frames * patch * patch))
        grids = {"image_grid_thw": torch.tensor([[1, side, side]] * count)}
        yield {"pixel_values": rows, **grids}, 0
        yield {"pixel_values": rows.reshape(len(rows), -1, patch, patch), **grids}, 0
        yield {"pixel_values": rows, **grids}, side * side // merged**2

    def _packed(self, count: int, most: int, noise: Noise) -> Others:
        """Return the patches of each image in a row of its own, with height and width, or with the places of all."""
        pooled = first_of(self.vision, "pooling_kernel_size", default=1)
        number = first_of(self.vision, "num_patches", default=most * pooled**2)
        side = math.isqrt(number) // pooled * pooled
        pixels = noise((count, side * side, self.channels * self.vision.patch_size**2))
        if "image_position_ids" in self.takes:
            ticks = torch.arange(side)
            places = torch.stack([ticks.repeat(side), ticks.repeat_interleave(side)], -1)
            return {"pixel_values": pixels, "image_position_ids": places.repeat(count, 1, 1)}
        return {
            "pixel_values": pixels,
            "spatial_shapes": torch.tensor([[side, side]] * count),
            "pixel_attention_mask": torch.ones(count, side * side).long(),
        }

    def _tiled(self, count: int, noise: Noise) -> Others:
        """Return images in tiles of the tower's size, with one that shows all, of the first size that the config names."""
        size = self.vision.image_size
        height, width = self.config.image_grid_pinpoints[0]
        tiles = 1 + math.ceil(height / size) * math.ceil(width / size)
        return {
            "pixel_values": noise((count, tiles, self.channels, size, size)),
            "image_sizes": torch.tensor([[height, width]] * count),
        }

    def _beside(self, batch: dict[str, Tensor], is_marked: Tensor) -> Others:
        """Return what each token is, and the places of tokens that follow from grids."""
        found: Others = {}
        if "token_type_ids" in self.takes:
            # In models that say so of images, 1 for these; in those that tell a prefix from what is learned, 0 for them.
            marked = is_marked if "mm_token_type_ids" in self.takes else ~is_marked
            found["token_type_ids"] = marked.long()
        places = getattr(getattr(self.model, "model", None), "get_rope_index", None)
        if places is not None and "image_grid_thw" in batch:
            found["position_ids"] = _places(places, batch, is_marked)
        return found


def _places(places: Any, batch: dict[str, Tensor], is_marked: Tensor) -> Tensor:
    """Return the places of tokens in time, height and width, which follow from the grids."""
    given = {
        **batch,
        "mm_token_type_ids": is_marked.int(),
        "attention_mask": torch.ones_like(is_marked).long(),
    }
    taken = inspect.signature(places).parameters
    return places(**{name: given[name] for name in taken if name in given})[0]
