"""Precisions that some devices do not have."""

from __future__ import annotations

import pytest

from shardwright.errors import InputError
from shardwright.files.clusterfile import parse_cluster
from shardwright.verbs.study import possible_precision


@pytest.mark.parametrize("precision", ["fp8", "fp8-row"])
def test_8_bit_products_are_refused_where_a_device_has_none(precision: str) -> None:
    assert possible_precision(parse_cluster("2x8xH100"), precision) == precision
    assert possible_precision(parse_cluster("2x8xA100"), "auto") == "bfloat16"
    with pytest.raises(
        InputError, match="A100-SXM4-80GB has rates for float32, float16, bfloat16 "
    ):
        possible_precision(parse_cluster("2x8xA100"), precision)
