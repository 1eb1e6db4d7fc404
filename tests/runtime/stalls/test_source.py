"""Loaders whose batches are drawn again."""

from collections import defaultdict
from typing import NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from shardwright.errors import InputError
from shardwright.runtime.stalls.source import Source, kept, rebuilt, samples_of


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


class Stream(IterableDataset):
    def __iter__(self):
        yield from range(12)


def test_a_shuffled_loader_gives_equal_items_again():
    data = TensorDataset(torch.arange(100))
    source = Source(DataLoader(data, batch_size=4, shuffle=True))
    source.pick(5)
    one = [batch[0].tolist() for batch in source.some()]
    two = [batch[0].tolist() for batch in source.some(workers=0)]
    assert one == two
    assert len(one) == 5
    assert source.dataset_samples == 100
    assert one != [[4 * k + j for j in range(4)] for k in range(5)]


def test_without_batches_items_are_drawn_by_index():
    source = Source(DataLoader(TensorDataset(torch.arange(10)), batch_size=None, shuffle=True))
    source.pick(4)
    assert len(list(source.some())) == 4
    assert list(map(str, source.some())) == list(map(str, source.some()))


def test_what_has_no_indices_is_iterated_anew():
    source = Source(lambda: iter(range(3)))
    source.pick(2)
    assert not source.can_pick
    assert list(source.some()) == list(source.some()) == [0, 1, 2]
    stream = Source(DataLoader(Stream(), batch_size=4))
    stream.pick(2)
    assert stream.picked == []
    assert len(list(stream.some())) == 3
    assert stream.dataset_samples == 0


def test_what_cannot_be_drawn_again_is_refused():
    with pytest.raises(InputError, match="gives its batches once; pass the function"):
        Source(iter([1, 2]))
    with pytest.raises(InputError, match="not int"):
        Source(3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="returned NoneType"):
        Source(lambda: None)  # type: ignore[arg-type, return-value]


def test_samples_and_copies_of_nested_batches():
    x = torch.zeros(6, 2)
    batch = {"pair": Pair(x, torch.ones(6)), "names": ["a"] * 6, "scale": torch.tensor(2.0)}
    copy = kept(batch)
    x += 1
    assert copy["pair"].x.sum() == 0
    assert isinstance(copy["pair"], Pair)
    assert samples_of(copy) == samples_of([copy]) == 6
    assert (samples_of("text"), samples_of([1, 2, 3]), samples_of(5)) == (4, 3, 1)


def apart(samples):
    """Collate as detection does: images stay as they are."""
    return tuple(zip(*samples, strict=True))


def test_samples_are_as_many_as_were_asked_for_whatever_a_collate_makes_of_them():
    pictures = TensorDataset(torch.zeros(20, 3, 8, 8), torch.arange(20))
    source = Source(DataLoader(pictures, batch_size=5, collate_fn=apart))
    source.pick(2)
    batch = next(iter(source.some()))
    assert source.samples_of(batch) == 5
    assert samples_of(batch) == 3, "colours, which look like samples"


def test_a_batch_that_a_step_takes_apart_is_whole_again():
    batch = defaultdict(list, x=torch.zeros(2), labels=[torch.ones(2)])
    again = rebuilt(batch, lambda tensor: tensor)
    assert again.pop("labels")[0] is batch["labels"][0]
    again["x"] = None
    assert again["nothing"] == []
    assert set(batch) == {"x", "labels"}
    assert batch["x"] is not None
