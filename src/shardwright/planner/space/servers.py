"""Parameter servers: a data-parallel strategy whose parameters lie on devices that only update them.

Li et al., "Scaling Distributed Machine Learning with the Parameter Server", 2014. Every parameter is laid out as
one row and cut into as many pieces as there are servers, so that all hold, receive and send equally many bytes.
"""

from __future__ import annotations

from dataclasses import replace

from shardwright.core.layout import FLAT, REPLICATE
from shardwright.core.strategy import Mesh, ParameterConfig, Strategy

AXIS = "server"


def with_servers(made: Strategy, servers: tuple[int, ...], workers: tuple[int, ...]) -> Strategy:
    """Return a strategy of one mesh on the devices ``workers``, with its parameters on the devices
    ``servers``, which may be some of these. Raises ValueError where it has several meshes."""
    if len(made.meshes) != 1:
        raise ValueError(f"servers serve one mesh, but the strategy has {len(made.meshes)}")
    home = Mesh(axes=(AXIS,), sizes=(len(servers),), devices=servers)
    layout = (FLAT if len(servers) > 1 else REPLICATE,)
    kept = ParameterConfig(rest=layout, optimizer=layout, mesh=0)
    return replace(
        made,
        meshes=(home, replace(made.meshes[0], devices=workers)),
        configs=tuple([replace(config, mesh=1) for config in made.configs]),
        parameters=(kept,) * len(made.parameters),
        label=servers_label(len(workers), len(servers), set(servers) <= set(workers)),
    )


def servers_label(workers: int, servers: int, shares: bool) -> str:
    """Return what people call it."""
    where = " on the workers' devices" if shares else ""
    return f"parameter server x {servers}{where}, {workers} workers"


def is_served(strategy: Strategy) -> bool:
    """Whether some parameters lie on a mesh of their own."""
    return any(config.mesh >= 0 for config in strategy.parameters)
