"""Example batches of text with something of another sense among it, for models that put an image's or a sound's features
where marked tokens stand.

How many tokens one takes is asked of the model itself, built without values: its tower says how many features it makes.
"""

from __future__ import annotations

import copy
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import InputError
from shardwright.runtime.capture.known import KnowingMode
from shardwright.runtime.capture.prepare import fake_copy, quiet

Draw = Callable[[tuple[int, ...], int, int], Tensor]
Noise = Callable[[tuple[int, ...]], Tensor]
Others = dict[str, Tensor]
IGNORED = -100  # the label that no loss of transformers counts


class Mixed(ABC):
    """What a model of a config takes: ``model`` has no values, ``takes`` are the names of what forward takes."""

    sense = ""  # what is among the text

    def __init__(self, config: Any, task: str) -> None:
        import transformers

        with torch.device("meta"):
            self.model = getattr(transformers, task).from_config(copy.deepcopy(config))
        self.config, self.text = config, config.get_text_config()
        self.takes = inspect.signature(self.model.forward).parameters
        self.token = first_of(config, f"{self.sense}_token_id", f"{self.sense}_token_index")
        maker = self._maker(self.model)
        self.asked = inspect.signature(maker).parameters if maker else {}

    def batch(
        self, count: int, length: Callable[[int], int], draw: Draw, noise: Noise
    ) -> dict[str, Tensor]:
        """Return ``count`` samples with one of the others each; ``length`` says how many tokens a sample has of which so many
        are for it."""
        if not isinstance(self.token, int):
            if self._maker(self.model) is None:
                return self._apart(count, length(0), draw, noise)
            raise TypeError(f"it has no {self.sense}_token_id, which stands where its features go")
        others, features = self._taken(self._others(count, length(0) // 2, draw, noise))
        tokens_each = length(features)
        if tokens_each < features + 2:
            raise InputError(
                f"an {self.sense} of {self.config.model_type} takes {features} tokens, so that seq must be at least "
                f"{features + 2}, not {tokens_each}; raise it, or lower the size that the config says of it"
            )
        tokens = self._text(draw((count, tokens_each), self.text.vocab_size, 1))
        tokens[:, 1 : 1 + features] = self.token
        is_marked = tokens == self.token
        batch = {"input_ids": tokens, "labels": tokens.masked_fill(is_marked, IGNORED)} | others
        if getattr(self.config, "is_encoder_decoder", False):
            batch["labels"] = self._text(draw((count, tokens_each), self.text.vocab_size, 2))
        return batch | self._beside(batch, is_marked)

    @abstractmethod
    def _others(
        self, count: int, most: int, draw: Draw, noise: Noise
    ) -> Iterator[tuple[Others, int]]:
        """Yield the others in each form in which the model may take them, and how many features it makes of each where
        the config says that, else 0; of a size that may be chosen, at most so many."""

    @abstractmethod
    def _beside(self, batch: dict[str, Tensor], is_marked: Tensor) -> Others:
        """Return what else the model takes, which follows from a batch."""

    def _maker(self, model: Any) -> Any:
        """Return what makes features, None where no function does that alone."""
        name = f"get_{self.sense}_features"
        found = getattr(model, name, None)
        return found or getattr(getattr(model, "model", model), name, None)

    def _apart(self, count: int, length: int, draw: Draw, noise: Noise) -> dict[str, Tensor]:
        """Return samples for a model that takes the others beside text, not among it."""
        others, _ = next(self._others(count, length, draw, noise))
        tokens = self._text(draw((count, length), self.text.vocab_size, 1))
        batch = {"input_ids": tokens, "labels": tokens.clone(), **others}
        unknown = [name for name in batch if name not in self.takes]
        if unknown:  # what is handed on without a name may be for nobody
            raise TypeError(f"its forward takes no {unknown[0]}")
        mode = KnowingMode(allow_non_fake_inputs=True)
        model = fake_copy(mode, self.model, None)
        with torch.no_grad(), quiet(), mode:  # no config says whether that is all
            model(**{name: mode.known(one) for name, one in batch.items()})
        return batch

    def _taken(self, forms: Iterator[tuple[Others, int]]) -> tuple[Others, int]:
        """Return the first form that the tower makes features of, and how many of each."""
        refused: Exception | None = None
        for others, features in forms:
            try:
                return others, features or self._features(others)
            except Exception as error:  # noqa: BLE001 - whatever it does not take, it may take the next
                refused = refused or error
        raise TypeError(f"no form that is known of its {self.sense} is taken: {refused}")

    def _features(self, others: Others) -> int:
        """Return how many features the tower makes of one, of which it may ask whether it is padding."""
        mode = KnowingMode(allow_non_fake_inputs=True)
        make = self._maker(fake_copy(mode, self.model, None))
        count = min(map(len, others.values()))  # patches of all lie one behind the other
        given = {
            name: mode.known(one[: len(one) // count])
            for name, one in others.items()
            if name in self.asked
        }
        with torch.no_grad(), quiet(), mode:
            made = make(**given)
        made = first_of(made, "pooler_output", "last_hidden_state", default=made)
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


def first_of(owner: Any, *names: str, default: Any = None) -> Any:
    """Return the first of the fields that a config, or what a model returns, has."""
    found = (getattr(owner, name, None) for name in names)
    return next((one for one in found if one is not None), default)
