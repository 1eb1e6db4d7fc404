"""What things cost: seconds of operators and messages, bytes of segments.

Every duration says whether it was measured, published or modelled. This room prices what ``space``
and ``lower`` describe; it chooses nothing.
"""

from shardwright.planner.cost.collective import collective_seconds
from shardwright.planner.cost.compute import operator_costs
from shardwright.planner.cost.price import Prices, price
from shardwright.planner.cost.roofline import Rates
from shardwright.planner.cost.shards import ShardPrices

__all__ = [
    "Prices", "Rates", "ShardPrices", "collective_seconds", "operator_costs", "price",
]  # fmt: skip
