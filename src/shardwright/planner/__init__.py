"""The deciding wing: pure functions from graph, cluster and costs to plans.

Nine rooms in one chain, each importing those before it: space, cost, schedule, lower, simulate, solve,
model, judge, search. No torch, no clock, no disk, no printing: equal arguments give equal results.
"""
