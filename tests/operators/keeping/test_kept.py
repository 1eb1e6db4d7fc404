"""What the tables say of every kind of operator that has an example, against PyTorch: what autograd keeps for backward,
and what its formulas need for a moment."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from shardwright.core.graph import OperatorGraph
from shardwright.operators.derivatives import base_kind, is_identity, passes_gradient
from shardwright.operators.keeping.contraction import contraction
from shardwright.operators.keeping.kept import saved_tensors
from shardwright.operators.keeping.temporaries import (
    CELLS,
    MADE,
    MADE_BACK,
    ON_CPUS,
    SPREADS,
    made_backward,
    made_forward,
)
from shardwright.runtime.allocations import allocations
from shardwright.runtime.rules import Case, Refused, draw
from shardwright.verbs.examples import EXAMPLES
from tests.operators.keeping.test_memory import calls_alone, values_alone

pytestmark = pytest.mark.torch

# Composed of many operators, or of another number of them from size to size: of these all floating operands and results
# are taken to be kept, which is told wrong by up to three of the largest.
ROUGH = {
    "quantile", "nanquantile", "multilabel_margin_loss", "multi_margin_loss", "cosine_embedding_loss",
    "hinge_embedding_loss", "margin_ranking_loss", "triplet_margin_loss", "ctc_losses", "nanmean", "trapezoid",
    "stft", "einsum", "tensordot", "linalg_svdvals", "linalg_matrix_power", "linalg_matrix_norm", "conv3d", "nll_loss2d", "embedding_bags",
    "matmul",
}  # fmt: skip
# Kept by kernels, whose memory does not grow with sizes as small as these: ``test_workspaces``.
KERNELS = {
    "lstm",
    "gru",
    "rnn_tanh",
    "rnn_relu",
    "packed_recurrence",
    "_linalg_det",
    "_linalg_slogdet",
}


@dataclass(frozen=True)
class Drawn:
    """A call on real tensors of single precision, and the graph that says which are trained."""

    name: str
    case: Case
    leaves: list[Tensor]
    graph: OperatorGraph

    @property
    def bare(self) -> str:
        return base_kind(self.case.kind)

    def run(self) -> list[Tensor]:
        return self.case.run(self.leaves)


def size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def drawn() -> Iterator[Drawn]:
    """All examples that autograd flows through."""
    for kind, calls in sorted(EXAMPLES.items()):
        for number, call in enumerate(calls):
            case = draw(kind, call, seed=1)
            tensors = [t.float() if t.dtype == torch.float64 else t for t in case.tensors]
            flows = case.differentiable
            leaves = [
                tensor.clone().requires_grad_(flow and tensor.is_floating_point())
                for tensor, flow in zip(tensors, flows, strict=True)
            ]
            case = replace(case, tensors=tuple(tensors))
            try:
                results = case.run(leaves)
                specs = case.graph.tensors
            except (Refused, RuntimeError):
                continue
            if not any(one.requires_grad for one in results):
                continue
            every = [*leaves, *results]
            marked = [
                replace(spec, needs_gradient=tensor.requires_grad)
                for spec, tensor in zip(specs, every, strict=True)
            ]
            yield Drawn(
                f"{kind}, example {number}",
                case,
                leaves,
                replace(case.graph, tensors=tuple(marked)),
            )


def kept_by_autograd(one: Drawn) -> int:
    """Return the bytes of all storages that autograd holds: operands, results, and what no tensor of the graph is."""
    held: dict[int, int] = {}
    alive: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        alive.append(tensor)  # so that no address is used twice
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        alive += one.run()
    return sum(held.values())


def test_every_kind_keeps_what_the_table_says() -> None:
    wrong: list[str] = []
    for one in drawn():
        if one.bare in KERNELS:
            continue
        operator, results = one.graph.operators[0], one.run()
        inputs, outputs, extra = saved_tensors(one.graph, operator)
        shapes = [tuple(tensor.shape) for tensor in (*one.leaves, *results)]
        told = sum(size(one.leaves[place]) for place in set(inputs))
        told += sum(size(results[place]) for place in set(outputs))
        told += extra(tuple(shapes[: len(one.leaves)]), tuple(shapes[len(one.leaves) :]))
        unit = max(map(size, (*one.leaves, *results)))
        found = kept_by_autograd(one)
        # Counts, weights of classes and the like are left out.
        if abs(told - found) > (3 if one.bare in ROUGH else 0.34) * unit:
            wrong.append(f"{one.name}: {told} said, {found} kept, of {unit}")
    assert not wrong, "\n".join(wrong)


def level_and_peak(run: Callable[[], object]) -> tuple[int, int]:
    """Return the bytes that a run leaves, and the most that there were."""
    level = peak = 0
    for _, change in allocations(run):
        level += change
        peak = max(peak, level)
    return level, peak


TIMES = MADE.keys() | MADE_BACK.keys() | ON_CPUS.keys() | SPREADS | CELLS.keys()
# Said of one of their forms: of two tensors, of logarithms, of rounded quotients; of sums that are no means; of cosines of
# rows as many as each other.
OTHER_FORMS = {
    "pow.Tensor_Tensor", "pow.Scalar", "kl_div", "div.Tensor_mode", "divide.Tensor_mode", "l1_loss",
    "binary_cross_entropy_with_logits", "cosine_similarity",
}  # fmt: skip


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Nothing that others left goes meanwhile."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("uncollected")
def test_formulas_need_for_a_moment_what_the_table_says() -> None:
    """To one and a half of the largest tensor, where that is no number alone."""
    torch.set_num_threads(1)
    wrong: list[str] = []
    for one in drawn():
        form = one.case.kind.split(".", 1)[1].removesuffix(".default")
        if one.bare not in TIMES or form in OTHER_FORMS or not one.leaves[0].dim():
            continue
        operator, call, values = (
            one.graph.operators[0],
            calls_alone(one.graph)[0],
            values_alone(one.graph),
        )
        results = one.run()
        ends = [result for result in results if result.requires_grad]
        wanted = [leaf for leaf in one.leaves if leaf.requires_grad]
        ones = [torch.ones(end.shape, dtype=end.dtype) for end in ends]
        held: list[tuple[Tensor, ...]] = []

        def back(
            ends: list[Tensor] = ends,
            wanted: list[Tensor] = wanted,
            ones: list[Tensor] = ones,
            held: list[tuple[Tensor, ...]] = held,
        ) -> None:
            found = torch.autograd.grad(ends, wanted, ones, retain_graph=True, allow_unused=True)
            held.append(found)

        _, peak = level_and_peak(back)
        made = sum(
            size(leaf)
            for place, leaf in enumerate(one.leaves)
            if leaf.requires_grad
            and not is_identity(one.graph, operator)
            and not passes_gradient(operator, place, tuple(leaf.shape), tuple(ends[0].shape))
        )
        unit = max(map(size, (*one.leaves, *results)))
        told = made_backward(one.bare, one.graph, operator, call, values)
        if abs(told - (peak - made)) > 1.5 * unit:
            wrong.append(f"backward of {one.name}: {told} said, {peak - made} needed, of {unit}")
        left, alive = level_and_peak(lambda one=one, held=held: held.append(tuple(one.run())))
        told = made_forward(one.bare, call, values)
        if abs(told - (alive - left)) > 1.5 * unit:
            wrong.append(f"forward of {one.name}: {told} said, {alive - left} needed, of {unit}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize(
    ("shapes", "equation"),
    [
        (((4, 6, 16, 8), (4, 6, 16, 8)), "bhsd,bhse->bhsde"),
        (((16, 64), (64,)), ""),
    ],
)
def test_gradients_of_what_was_broadcast_are_whole_at_first(
    shapes: tuple[tuple[int, ...], ...], equation: str
) -> None:
    torch.set_num_threads(1)
    a, b = (torch.randn(shape, requires_grad=True) for shape in shapes)
    result = torch.einsum(equation, a, b) if equation else a * b
    ones = torch.ones_like(result)
    _, peak = level_and_peak(lambda: torch.autograd.grad(result, (a, b), ones))
    whole = size(result)
    assert peak == pytest.approx(2 * whole, rel=0.1)
    assert math.prod(result.shape) >= max(a.numel(), b.numel())


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("bqhd,bkhd->bhqk", ((4, 8, 4, 32), (4, 8, 4, 32))),
        ("bhqk,bkhd->bqhd", ((4, 4, 8, 8), (4, 8, 4, 32))),
        ("btd,edf->betf", ((4, 8, 32), (4, 32, 16))),
        ("gsec,gsd->egcd", ((4, 8, 4, 4), (4, 8, 32))),
        ("bhnd,hde->bhne", ((4, 4, 8, 32), (4, 32, 16))),
        ("abcd,abdc->ab", ((4, 4, 8, 32), (4, 4, 32, 8))),
        ("ij,kj->ki", ((32, 64), (16, 64))),
    ],
)
def test_einsum_copies_what_a_product_wants_otherwise(
    equation: str, shapes: tuple[tuple[int, ...], ...]
) -> None:
    torch.set_num_threads(1)
    operands = [torch.randn(shape, requires_grad=True) for shape in shapes]
    held: list[Tensor] = []
    with saved_tensors_hooks(lambda tensor: held.append(tensor) or tensor, lambda tensor: tensor):
        result = torch.einsum(equation, *operands)
    kept = {tensor.untyped_storage().data_ptr() for tensor in held}
    copied = [one.untyped_storage().data_ptr() not in kept for one in operands]
    ones, found = torch.ones(result.shape), list[tuple[Tensor, ...]]()
    _, peak = level_and_peak(lambda: found.append(torch.autograd.grad(result, operands, ones)))
    more = peak - sum(size(one) for one in operands)
    told = contraction(equation, shapes)
    assert told is not None
    assert [told.left, told.right] == copied
    assert more == pytest.approx(told.gradient * size(result), abs=64)
