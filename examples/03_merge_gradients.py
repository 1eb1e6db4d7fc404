"""Choose which gradients travel together: the exact optimum and the rule of MG-WFBP differ."""

from shardwright.planner.schedule import finish_time, merge_gradients

ready_seconds = [1.0, 2.0, 3.0]  # when backward has made each gradient
sizes_bytes = [10.0, 10.0, 10.0]


def cost(num_bytes: float) -> float:
    """Return the seconds of one all-reduce: a latency, and a second per byte."""
    return 1.5 + num_bytes


for method in ("wfbp", "single", "mgwfbp", "optimal"):
    buckets = merge_gradients(ready_seconds, sizes_bytes, cost, method)
    finish = finish_time(buckets, ready_seconds, sizes_bytes, cost)
    print(f"{method:8} finishes at {finish:4.1f} s with buckets {buckets}")
