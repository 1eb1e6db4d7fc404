"""What the ranks of many tests do first, done once: imported by the process that they are forked from."""

import gc
import sys

from shardwright.runtime.capture import capture
from tests import zoo
from tests.runtime.equivalence import captured_of

# As seldom as in the process that runs the tests, and a rank ends soon.
gc.set_threshold(500_000, 10, 10)
_BEFORE = set(sys.modules)
capture(*zoo.mlp())
# By capturing, besides what launched processes have imported already.
IMPORTED = len(set(sys.modules) - _BEFORE)
for factory in (zoo.mlp, zoo.gpt):
    captured_of(factory)
