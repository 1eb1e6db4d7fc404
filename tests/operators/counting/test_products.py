"""The list of matrix-like operators, against torch's own counter of flops."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from torch.utils.flop_counter import FlopCounterMode, flop_registry  # noqa: E402

from shardwright.operators.counting.products import ATTENTION, GROUPED, HEAVY, RECURRENT  # noqa: E402
from shardwright.operators.counting.work import local_flops  # noqa: E402
from shardwright.operators.derivatives import base_kind  # noqa: E402
from shardwright.runtime.rules.cases import REFUSALS, Refused, draw  # noqa: E402
from shardwright.verbs.examples import EXAMPLES  # noqa: E402

pytestmark = pytest.mark.torch

# Counted by torch as the products that it happens to make of them on this machine, or as many as an exponent asks for.
NOT_ALWAYS_PRODUCTS = frozenset({"cdist", "_cdist_forward", "linalg_matrix_power"})


def counted(case) -> float | None:
    """Return the flops that torch counts in a call, None where it refuses the call."""
    try:
        with FlopCounterMode(display=False) as counter:
            case.run(case.tensors)
    except REFUSALS:
        return None
    return float(counter.get_total_flops())


def test_every_operator_in_which_torch_counts_products_has_that_price():
    wrong, seen = [], set()
    for kind, calls in EXAMPLES.items():
        bare = base_kind(kind)
        is_fused = bare in RECURRENT and not bare.endswith("_cell")
        if is_fused or bare in NOT_ALWAYS_PRODUCTS:
            continue  # torch counts nothing inside a fused recurrent kernel
        for call in calls:
            try:
                case = draw(kind, call)
                shapes = tuple(tuple(tensor.shape) for tensor in case.tensors)
                results = tuple(tuple(tensor.shape) for tensor in case.results)
            except Refused:
                continue
            flops = counted(case)
            if flops is None:
                continue
            equation = str(case.arguments.get("equation", ""))
            transposed = case.arguments.get("transposed") is True
            priced = local_flops(bare, shapes, results, equation, transposed)
            if not flops:
                continue  # products of vectors, and attention on this backend, are not counted
            seen.add(bare)
            if priced != pytest.approx(flops):
                wrong.append((kind, shapes, flops, priced))
    assert not wrong
    assert {"linear", "matmul", "bmm", "einsum", "conv_transpose2d", "_grouped_mm"} <= seen


def test_every_forward_kernel_that_torch_can_count_is_in_the_list():
    names = {str(kernel).split(".")[-1] for kernel in flop_registry}
    forward = {name for name in names if not name.endswith("backward")}
    assert forward <= HEAVY | ATTENTION


@pytest.mark.parametrize("kind", sorted(GROUPED))
def test_a_grouped_product_costs_what_its_rows_cost_in_one_product(kind):
    rows, width, out, groups = 48, 8, 20, 6
    whole = local_flops("mm", ((rows, width), (width, out)), ((rows, out),))
    shapes = ((rows, width), (groups, width, out), (groups,))
    assert local_flops(kind, shapes, ((rows, out),)) == whole
