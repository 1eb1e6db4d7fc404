"""An example call of every kind of operator that has a rule, one file per family of rules.

They are what ``shardwright verify-rules`` and the tests run in pieces against whole, at the sizes
written here and at random ones. A rule without an example is refused by both.
"""

from __future__ import annotations

from shardwright.core.example import Call
from shardwright.verbs.examples import (
    algebra,
    convolution,
    creation,
    indexing,
    losses,
    matrices,
    normalisation,
    pointwise,
    reductions,
    sequences,
    views,
)

EXAMPLES: dict[str, tuple[Call, ...]] = {
    **pointwise.EXAMPLES,
    **algebra.EXAMPLES,
    **views.EXAMPLES,
    **reductions.EXAMPLES,
    **normalisation.EXAMPLES,
    **convolution.EXAMPLES,
    **losses.EXAMPLES,
    **creation.EXAMPLES,
    **indexing.EXAMPLES,
    **sequences.EXAMPLES,
    **matrices.EXAMPLES,
}
