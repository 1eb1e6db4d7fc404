"""Which operators that slide windows over images may split them, and with what halo."""

from __future__ import annotations

import math

import pytest

from shardwright.core.graph import Constant
from shardwright.operators.splitting.iteration import Iteration
from shardwright.operators.splitting.rules import KIND
from shardwright.operators.splitting.rules.signature import Signature
from shardwright.planner.space.configs import choices, placements


def convolution(size: int, result: int, kernel: int, **attributes: Constant) -> Iteration:
    """A convolution of square images of ``size`` to ``result``."""
    return KIND["aten.conv2d.default"](
        Signature(
            kind="aten.conv2d.default",
            names=("input", "weight"),
            inputs=((4, 8, size, size), (16, 8, kernel, kernel)),
            outputs=((4, 16, result, result),),
            attributes=tuple(attributes.items()),
            dtypes=("float32",) * 3,
            are_parameters=(False, True),
        )
    )


def pooling(kind: str, size: int, result: int, kernel: int, **attributes: Constant) -> Iteration:
    return KIND[kind](
        Signature(
            kind=kind,
            names=("self",),
            inputs=((4, 8, size, size),),
            outputs=((4, 8, result, result),),
            attributes=(("kernel_size", kernel), *attributes.items()),
            dtypes=("float32",) * 2,
            are_parameters=(False,),
        )
    )


def reach(iteration: Iteration) -> list[tuple[str, int, int]]:
    return [(window.dim, window.before, window.after) for window in iteration.windows]


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation", "before", "after"),
    [(3, 1, 1, 1, 1, 1), (5, 1, 2, 1, 2, 2), (7, 2, 3, 1, 3, 2), (3, 2, 1, 1, 1, 0), (3, 1, 2, 2, 2, 2)],
)  # fmt: skip
def test_kernel_stride_padding_and_dilation_decide_the_halo(
    kernel: int, stride: int, padding: int, dilation: int, before: int, after: int
) -> None:
    iteration = convolution(
        32, 32 // stride, kernel, stride=stride, padding=padding, dilation=dilation
    )
    assert reach(iteration) == [("h", before, after), ("w", before, after)]


@pytest.mark.parametrize(("kernel", "stride"), [(1, 1), (2, 2), (16, 16), (1, 2)])
def test_windows_side_by_side_need_no_halo(kernel: int, stride: int) -> None:
    iteration = convolution(32, 32 // stride, kernel, stride=stride)
    assert not iteration.windows
    assert iteration.inputs[0][2:] == ("h", "w")


def test_pieces_that_would_drift_apart_stay_whole() -> None:
    assert convolution(32, 30, 3).inputs[0] == ("n", "k", "", "")
    assert convolution(32, 32, 3, padding="same").inputs[0] == ("n", "k", "", "")
    assert convolution(31, 16, 3, stride=2, padding=1).inputs[0] == ("n", "k", "", "")


def test_beyond_the_image_a_maximum_sees_less_than_all_numbers() -> None:
    (window, _) = pooling("aten.max_pool2d.default", 32, 16, 3, stride=2, padding=1).windows
    assert (window.before, window.after, window.fill) == (1, 0, -math.inf)


def test_an_average_whose_last_window_leaves_its_padding_stays_whole() -> None:
    for kind, names in (("max", ("h", "w")), ("avg", ("", ""))):
        iteration = pooling(f"aten.{kind}_pool2d.default", 8, 4, 3, stride=2, ceil_mode=True)
        assert iteration.inputs[0][2:] == names


def test_pieces_are_not_smaller_than_their_halo() -> None:
    iteration = convolution(8, 8, 7, padding=3)
    pieces = {dims[0] for dims in choices(iteration, (4,))}
    assert pieces == {"", "n", "f", "k"}
    assert ("h",) in choices(iteration, (2,))
    assert ("h", "h") not in choices(iteration, (2, 2))
    assert ("h", "w") in choices(iteration, (2, 2))


def test_an_input_says_which_axes_bring_which_halo() -> None:
    iteration = convolution(32, 32, 3, padding=1)
    (rows, columns) = placements(iteration, ("w", "h")).inputs[0].halos
    assert (rows.dim, rows.axes, columns.dim, columns.axes) == (2, (1,), 3, (0,))
    (both,) = placements(iteration, ("h", "h")).inputs[0].halos
    assert both.axes == (0, 1)
    assert placements(iteration, ("h", "h")).inputs[1].gradient == (-2, -2)
