"""Every number that steers the search, each with what it trades.

Two plans are "the same" to the search when they differ by less than a share of the half-width of the
difference of like plans (``judge.ties``). The numbers may be tuned on the "tuned" half
of the suite of ``benchmarks/mcmc.py`` only. Not here: what steers no search (``tests/house/test_complexity.py`` says of
each number what it is instead).
"""

from __future__ import annotations

# What is the same, near, far.
# Plans nearer than this share of the half-width are the same: 0.1 % of a step where costs are modelled.
# More loses what adds up from small gains, less simulates one plan on many meshes. The same share of a step is
# between candidates of the additive model on other meshes, which is coarser, what starting messages takes before it
# is felt, and what losing more of the gradients must gain.
SAME = 0.02
# What is this much slower, or larger, is not worth following up: beside the fastest it is only a corner of
# the frontier. Neighbours on the frontier are far apart if time and memory both differ by more. The additive model's
# bytes may be off by as much (simulated over modelled: 0.91 at least, in 18 plans of three transformers).
CLOSE = 1.1

# How much is simulated.
# Operators simulated to refine one plan; the one budget in which simulations are counted. Time grows with
# it, gains level off. Twice as many where more can be gained: where the bound lies below the fastest plan by more than
# its half-width.
BUDGET = 20_000
# A plan is refined by no fewer moves than these, else not at all (nothing is found by so few; graphs that allow
# them are "small": their whole frontier is looked at), and with so many in vain a climb ends.
LEAST_MOVES, PATIENCE = 20, 50
# By no more than these: chains of small graphs end before.
MOVES = BUDGET // PATIENCE
# So many candidates of the additive model are simulated if nobody says; of large graphs a third. Two of so many
# are worked on further, and half as many points has an arrangement's hull before only those around the memory
# limit are refined.
CANDIDATES = 12
# Of a list that is sorted by promise, the first so many: ways to split an operator, plans whose orders are searched.
# So many times the candidates where two free axes make many alike, and so many times the budget has the least memory
# of one stage.
FEW = 3
# So many times the memory is hopeless for like plans, too: orders of pipelines need a third at least.
HOPELESS = FEW

# What the additive model ranks by.
# Candidates are ranked as if this share of what computation could hide at best remained exposed.
HIDDEN = 0.08
