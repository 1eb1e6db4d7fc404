"""How values and gradients lie, against tensors that PyTorch made."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from shardwright.runtime.capture import capture
from shardwright.runtime.profile.layouts import Layout, lay_out, plain
from shardwright.runtime.profile.shards import apart, laid, make_shard

pytestmark = pytest.mark.torch

HEADS = 2


class LinearAttention(nn.Module):
    """Heads by hand: what is read lies in rows of queries, keys and values, and gradients come back transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(6, 18)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = [
            one.view(batch, length, HEADS, -1).transpose(1, 2)
            for one in self.into(x).chunk(3, -1)
        ]  # fmt: skip
        queries, keys, values = split[0], split[1].exp(), split[2]
        sums = torch.einsum("bhsd,bhse->bhsde", keys, values)
        mixed = torch.einsum("bhsd,bhsde->bhse", queries, sums) / queries.sum(-1, keepdim=True)
        self.seen = queries, keys, values, mixed
        return mixed.transpose(1, 2).reshape(batch, length, width).square().sum()


def test_values_and_gradients_lie_as_they_do_in_a_step() -> None:
    module, x = LinearAttention(), torch.rand(3, 4, 6)
    came: dict[str, tuple[int, ...]] = {}
    loss = module(x)
    seen = dict(zip(("queries", "keys", "values", "mixed"), module.seen, strict=True))
    for name, value in seen.items():
        value.register_hook(lambda g, name=name: came.__setitem__(name, g.stride()))
    loss.backward()
    graph = (model := capture(LinearAttention(), {"x": x})).graph
    layouts = lay_out(model, "cpu")
    moved = [o.outputs[0] for o in graph.operators if o.kind == "aten.transpose.int"]
    (grown,) = (o.outputs[0] for o in graph.operators if o.kind == "aten.exp.default")
    (mixed,) = (o.outputs[0] for o in graph.operators if o.kind == "aten.div.Tensor")
    found = {"queries": moved[0], "keys": grown, "values": moved[2], "mixed": mixed}
    assert {n: layouts.values[t].strides for n, t in found.items()} == {
        name: value.stride() for name, value in seen.items()
    }
    assert {n: layouts.gradients[t].strides for n, t in found.items()} == came
    assert came["mixed"] != plain((3, HEADS, 4, 3))


def test_a_shard_is_measured_on_operands_and_gradients_that_lie_so() -> None:
    model = capture(LinearAttention(), {"x": torch.rand(4, 4, 6)})
    index = [o.kind for o in model.graph.operators].index("aten.exp.default")
    half = (2, HEADS, 4, 3)
    layouts = lay_out(model, "cpu")
    shard = make_shard(model, (index, (half,), (half,)), "cpu", "float32", layouts)
    assert shard is not None
    keys = shard.operands[0].make("cpu")
    assert keys.stride() == (72, 3, 18, 1)  # rows of 18: a third of each is keys
    (seed,) = shard.seeds_of([keys.exp()])
    (operator,) = (o for o in model.graph.operators if o.kind == "aten.exp.default")
    assert seed.stride() == layouts.gradients[operator.outputs[0]].of(half)


@st.composite
def laid_out(draw: st.DrawFn) -> Tensor:
    """Return a tensor that is transposed, a part of a larger one, and expanded."""
    tensor = torch.rand(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
    if draw(st.booleans()):
        dim = draw(st.integers(0, tensor.dim() - 1))
        tensor = tensor.narrow(dim, 0, draw(st.integers(1, tensor.shape[dim])))
    if draw(st.booleans()):
        place = draw(st.integers(0, tensor.dim()))
        size = draw(st.integers(2, 3))
        tensor = tensor.unsqueeze(place)
        tensor = tensor.expand([size if d == place else -1 for d in range(tensor.dim())])
    return tensor


@given(laid_out(), st.data())
def test_a_part_lies_as_the_whole(tensor: Tensor, data: st.DataObject) -> None:
    layout = Layout(tuple(tensor.shape), tensor.stride())
    shape = tuple(data.draw(st.integers(1, size)) for size in tensor.shape)
    made = laid(torch.rand(shape), layout.of(shape))
    own = apart(made)
    places = [
        sum(i * s for i, s in zip(index, own.stride(), strict=True))
        for index in itertools.product(*map(range, own.shape))
    ]
    assert len({*places}) == len(places)  # no two share memory but what is expanded
    dims = [d for d in range(len(shape)) if tensor.shape[d] > 1]
    assert [not made.stride(d) for d in dims] == [not tensor.stride(d) for d in dims]
    for a, b in itertools.permutations([d for d in dims if shape[d] > 1], 2):
        if 0 < tensor.stride(a) < tensor.stride(b):
            assert made.stride(a) < made.stride(b)


@given(laid_out())
def test_all_of_a_tensor_lies_as_it_does(tensor: Tensor) -> None:
    strides = Layout(tuple(tensor.shape), tensor.stride()).of(tuple(tensor.shape))
    dims = [d for d in range(tensor.dim()) if tensor.shape[d] > 1]
    assert [strides[d] for d in dims] == [tensor.stride(d) for d in dims]


def test_windows_that_overlap_lie_row_by_row() -> None:
    windows = torch.rand(10).unfold(0, 4, 2)
    assert Layout(tuple(windows.shape), windows.stride()).of((2, 4)) == (4, 1)


@pytest.mark.parametrize("of_images", [False, True])
@given(
    whole=st.lists(st.integers(1, 4), min_size=4, max_size=4),
    part=st.lists(st.integers(1, 4), min_size=4, max_size=4),
)
def test_dims_of_one_change_no_format(whole: list[int], part: list[int], of_images: bool) -> None:
    """Convolutions ask whether weights of one by one lie channels last, which strides of such dims say."""
    form = torch.channels_last if of_images else torch.contiguous_format
    tensor = torch.empty(whole, memory_format=form)
    shape = tuple(map(min, whole, part))
    found = Layout(tuple(whole), tensor.stride()).of(shape)
    assert found == torch.empty(shape, memory_format=form).stride()
