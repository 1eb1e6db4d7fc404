"""Transforms of ``torch.func`` inside forward are operators of the whole batch, with the gradients of PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch._functorch import predispatch
from torch.func import functional_call, jvp, vmap

from shardwright.planner.space import Seed, seed_strategy
from shardwright.runtime.capture import capture
from shardwright.runtime.capture.transforms import written_out
from tests.runtime.capture.test_without_gradient import WIDTH, assert_captured, build
from tests.runtime.equivalence import assert_equivalent

pytestmark = pytest.mark.torch


def attended(h: Tensor) -> Tensor:
    def one(row: Tensor) -> Tensor:
        q, k = row.view(2, 2), row.view(2, 2).tanh()
        return F.scaled_dot_product_attention(q, k, k).flatten()

    return vmap(one)(h)


def crossed(h: Tensor) -> Tensor:
    """Every row with every other one, by two nested transforms with other dims."""
    pair = vmap(vmap(lambda a, b: (a - b).tanh().sum(), in_dims=(None, 1)), in_dims=(0, None))
    return pair(h, h.t()) @ h


def scattered(h: Tensor) -> Tensor:
    order = torch.arange(WIDTH - 1, -1, -1)
    return vmap(lambda row, n: row[order].cumsum(0) * n.exp(), out_dims=1)(h, h.mean(1)).t()


def in_chunks(h: Tensor) -> Tensor:
    return vmap(lambda row: F.layer_norm(row, [WIDTH]).softmax(0), chunk_size=3)(h)


def convolved(h: Tensor) -> Tensor:
    kernels = h[:, None, None, :3]
    return vmap(lambda row, w: F.conv1d(row.view(1, 1, -1), w, padding=1).view(-1))(h, kernels)


def directional(h: Tensor) -> Tensor:
    found = jvp(lambda one: one.tanh() * one.sin(), (h,), (h.detach() * 0.5,))
    return found[0] + found[1]


def on_a_device(h: Tensor) -> Tensor:
    """Names the device of its rows, as masks of transformers do."""
    seen = torch.ones(WIDTH, dtype=torch.bool)
    return vmap(lambda row: row * seen.to(row.device).to(device=row.device, dtype=row.dtype))(h)


def looked_up(h: Tensor) -> Tensor:
    """Elements by numbers that are counted, as masks of images among text do."""
    rows, columns = torch.arange(h.shape[0]), torch.arange(WIDTH)
    with TransformGetItemToIndex():
        one = vmap(lambda row, column: h[row, column] * (column <= row), in_dims=(None, 0))
        return vmap(one, in_dims=(0, None))(rows, columns)


TRANSFORMS = (
    attended, crossed, scattered, in_chunks, convolved, directional, on_a_device, looked_up,
)  # fmt: skip


def test_a_transform_has_the_gradients_of_plain_pytorch_and_is_not_opaque() -> None:
    for change in TRANSFORMS:
        assert_captured(change.__name__, change)


def test_a_transform_that_fails_leaves_none_begun() -> None:
    graph = fx.Graph()
    rows = graph.placeholder("rows")
    rows.meta["val"] = torch.empty(2, 3, device="meta")
    level = graph.call_function(predispatch._vmap_increment_nesting, (2, "error"))
    row = graph.call_function(predispatch._add_batch_dim, (rows, 0, level))
    wrong = graph.call_function(torch.ops.aten.mm.default, (row, row))
    found = graph.call_function(predispatch._remove_batch_dim, (wrong, level, 2, 0))
    graph.call_function(predispatch._vmap_decrement_nesting, ())
    graph.output(found)
    with pytest.raises(RuntimeError):
        written_out(fx.GraphModule(nn.Module(), graph))
    assert torch._C._functorch.peek_interpreter_stack() is None  # pyright: ignore[reportAttributeAccessIssue]


def stopped(h: Tensor) -> Tensor:
    return vmap(lambda row: row * row.detach().tanh())(h)


def written(h: Tensor) -> Tensor:
    return vmap(lambda row: row.clone().mul_(row.detach()))(h)


def unwatched(h: Tensor) -> Tensor:
    def one(row: Tensor) -> Tensor:
        with torch.no_grad():
            scale = row.exp()
        return row * scale

    return vmap(one)(h)


class Members(nn.Module):
    """An ensemble whose weights lie in one tensor, as the documentation of torch.func builds one."""

    def __init__(self, change: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(3, WIDTH, WIDTH, dtype=torch.float64))
        self.base, self.change = [nn.Linear(WIDTH, WIDTH, bias=False)], change

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        member = vmap(lambda w: functional_call(self.base[0], {"weight": w}, (self.change(x),)))
        return F.mse_loss(member(self.weights).mean(0), y)


def members() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    rows = torch.randn(2, 4, WIDTH, dtype=torch.float64)
    return Members(), {"x": rows[0], "y": rows[1]}


def test_an_ensemble_by_vmap_is_split_over_samples_and_into_microbatches() -> None:
    ways = {
        "microbatches": lambda graph: seed_strategy(graph, Seed(data=2, num_microbatches=2)),
        "ZeRO-3": lambda graph: seed_strategy(graph, Seed(data=2, zero=3)),
    }
    assert_equivalent(2, members, ways)


def test_what_would_lose_its_stop_of_gradients_stays_opaque() -> None:
    for change in (stopped, written, unwatched):
        module, batch = build(change)
        kinds = {one.kind for one in capture(module, batch).graph.operators}
        assert any(kind.startswith("opaque.") for kind in kinds), change.__name__
