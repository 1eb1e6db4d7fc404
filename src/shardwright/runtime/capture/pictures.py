"""Example batches of text with images among it, for models that put an image's features where marked tokens stand.

How many tokens an image takes is asked of the model itself, built without values: its tower says how many features it
makes of an image of the size that the config names.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import InputError
from shardwright.runtime.capture.known import KnowingMode
from shardwright.runtime.capture.prepare import fake_copy, quiet

Draw = Callable[[tuple[int, ...], int, int], Tensor]
Noise = Callable[[tuple[int, ...]], Tensor]
IGNORED = -100  # the label that no loss of transformers counts


class Pictures:
    """What a model of a config takes: ``model`` has no values, ``takes`` are the names of what forward takes."""

    def __init__(self, config: Any) -> None:
        import transformers

        chosen: Any = transformers.AutoModelForImageTextToText
        with torch.device("meta"):
            self.model = chosen.from_config(copy.deepcopy(config))
        self.config, self.vision = config, config.vision_config
        self.takes = inspect.signature(self.model.forward).parameters
        self.token = _first(config, "image_token_id", "image_token_index")

    def batch(
        self, count: int, length: Callable[[int], int], draw: Draw, noise: Noise
    ) -> dict[str, Tensor]:
        """Return ``count`` samples of one image each; ``length`` says how many tokens a sample has whose image takes so many."""
        images, features = self._images(count, length(0) // 2, noise)
        tokens_each = length(features)
        if tokens_each < features + 2:
            raise InputError(
                f"an image of {self.config.model_type} takes {features} tokens, so that seq must be at least "
                f"{features + 2}, not {tokens_each}; raise it, or lower the image_size of the config"
            )
        tokens = self._text(draw((count, tokens_each), self.config.get_text_config().vocab_size, 1))
        tokens[:, 1 : 1 + features] = self.token
        is_image = tokens == self.token
        batch = {"input_ids": tokens, "labels": tokens.masked_fill(is_image, IGNORED)} | images
        if "token_type_ids" in self.takes:
            batch["token_type_ids"] = self._kinds(is_image)
        places = getattr(self.model.model, "get_rope_index", None)
        if places is not None and "image_grid_thw" in images:
            batch["position_ids"] = self._places(places, batch, is_image)
        return batch

    def _images(self, count: int, most: int, noise: Noise) -> tuple[dict[str, Tensor], int]:
        """Return images as the model takes them, and how many features its tower makes of each: patches behind each
        other with their grids (of at most so many features), or pixels, of one image or a row of them, where asked
        for with their sizes."""
        channels = _first(self.vision, "in_channels", "num_channels", "in_chans", default=3)
        if "image_grid_thw" in self.takes:
            return self._patches(count, channels, most, noise)
        size = getattr(self.vision, "image_size", 224)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        pixels = noise((count, channels, height, width))
        sizes = torch.tensor([[height, width]] * count)
        extra = {"image_sizes": sizes} if self._wants("image_sizes") else {}
        refused: Exception | None = None
        for shaped in (pixels, pixels.unsqueeze(1)):
            images = {"pixel_values": shaped, **extra}
            try:
                return images, self._features({name: one[:1] for name, one in images.items()})
            except Exception as error:  # noqa: BLE001 - whatever it does not take, it may take the other
                refused = refused or error
        raise TypeError(f"its images are not taken as one or a row of them: {refused}")

    def _wants(self, name: str) -> bool:
        """Whether the model makes no features of an image without an argument."""
        parameter = inspect.signature(_maker(self.model)).parameters.get(name)
        return parameter is not None and parameter.default is inspect.Parameter.empty

    def _patches(
        self, count: int, channels: int, most: int, noise: Noise
    ) -> tuple[dict[str, Tensor], int]:
        patch, merged = self.vision.patch_size, _first(self.vision, "spatial_merge_size", default=1)
        frames = _first(self.vision, "temporal_patch_size", default=1)
        wide = _first(self.vision, "image_size", default=224) // patch // merged
        side = max(1, min(wide, math.isqrt(most))) * merged
        rows = noise((count * side * side, channels * frames * patch * patch))
        grids = torch.tensor([[1, side, side]] * count)
        return {"pixel_values": rows, "image_grid_thw": grids}, side * side // merged**2

    def _features(self, images: dict[str, Tensor]) -> int:
        """Return how many features the tower makes of an image, of which it may ask whether it is padding."""
        mode = KnowingMode(allow_non_fake_inputs=True)
        make = _maker(fake_copy(mode, self.model, None))
        with torch.no_grad(), quiet(), mode:
            made = make(**{name: mode.known(one) for name, one in images.items()})
        made = getattr(made, "pooler_output", made)
        pieces = made if isinstance(made, (list, tuple)) else [made]
        return sum(math.prod(one.shape[:-1]) for one in pieces)

    def _text(self, tokens: Tensor) -> Tensor:
        """Return tokens without those that mean something of their own."""
        named = {
            value
            for key, value in vars(self.config).items()
            if key.endswith(("token_id", "token_index"))
        }
        plain = next(one for one in range(len(named) + 1) if one not in named)
        special = torch.tensor([one for one in named if isinstance(one, int)])
        return tokens.masked_fill(torch.isin(tokens, special), plain)

    def _kinds(self, is_image: Tensor) -> Tensor:
        """Return what each token is: in models that say so of images, 1 for these; in those that tell a prefix from
        what is learned, 0 for them."""
        marked = is_image if "mm_token_type_ids" in self.takes else ~is_image
        return marked.long()

    def _places(self, places: Any, batch: dict[str, Tensor], is_image: Tensor) -> Tensor:
        """Return the places of tokens in time, height and width, which follow from the grids."""
        given = {
            **batch,
            "mm_token_type_ids": is_image.int(),
            "attention_mask": torch.ones_like(is_image).long(),
        }
        taken = inspect.signature(places).parameters
        return places(**{name: given[name] for name in taken if name in given})[0]


def _maker(model: Any) -> Any:
    """Return what makes features of images."""
    return getattr(model, "get_image_features", None) or model.model.get_image_features


def _first(config: Any, *names: str, default: Any = None) -> Any:
    """Return the first of the fields that a config has."""
    found = (getattr(config, name, None) for name in names)
    return next((one for one in found if one is not None), default)
