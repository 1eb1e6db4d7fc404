"""Parameter servers as they are asked for by name."""

from __future__ import annotations

from collections.abc import Callable

from shardwright.core.strategy import Strategy
from shardwright.errors import InputError
from shardwright.planner.model.arrangements import global_batch
from shardwright.planner.model.context import Context
from shardwright.planner.search.seedplans import SEED_PLANS, SERVERS, read_sizes
from shardwright.planner.space.seeds import Seed
from shardwright.planner.space.servers import with_servers


def served_plan(context: Context, text: str, make: Callable[[Seed], Strategy]) -> Strategy:
    """Return data parallelism over so many workers with so many servers: the first devices of the cluster, and
    the workers those behind; where there are not so many, servers lie on workers' devices, evenly between
    them. Without sizes every device is both. ``make`` makes the workers' strategy.

    Raises InputError where devices or batch do not suffice.
    """
    count, samples = context.num_devices, global_batch(context)
    workers, servers = read_sizes(SERVERS, text) if text else (count, count)
    if max(workers, servers) > count or samples % workers:
        raise InputError(
            "parameter servers, and workers with as many samples each, are devices of the cluster, but "
            f"{workers} workers and {servers} servers are asked for, and there are {count} devices and "
            f"{samples} samples; name others: {SERVERS}:{SEED_PLANS[SERVERS]}"
        )
    made = make(Seed(data=workers))
    if workers + servers <= count:
        return with_servers(made, tuple(range(servers)), tuple(range(servers, servers + workers)))
    most = max(workers, servers)
    spread = tuple([number * most // servers for number in range(servers)])
    return with_servers(made, spread, tuple(range(workers)))
