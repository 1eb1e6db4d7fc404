"""Why a plan is as it is: runners-up, neighbours, what more memory or faster links would buy; why not another;
and whether there is one at all.

``explain``, ``why_not`` and ``some_plan`` are the doors. No plan depends on them.
"""

from shardwright.reasons.alternative import Wish, why_not
from shardwright.reasons.existence import grown, some_plan
from shardwright.reasons.explanation import explain

__all__ = ["Wish", "explain", "grown", "some_plan", "why_not"]
