"""The deciding wing: pure functions from graph, cluster and costs to plans.

Six rooms in one chain, each importing those before it: space, cost, schedule, lower, simulate,
search. Beside them ``pipelines`` plans profiles of layers, which know no shapes. No torch, no
clock, no disk, no printing: equal arguments give equal results.
"""
