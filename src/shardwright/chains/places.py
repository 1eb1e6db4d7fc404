"""Where operators run, and the meshes that they run on: what chains change besides what refinement does."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardwright.core.cluster import Cluster
from shardwright.core.strategy import Mesh, OperatorConfig, Strategy
from shardwright.planner.model.context import Context
from shardwright.planner.search.local.moves import Dims, Space, follow

# Most axes of a fine mesh: three give every power of two up to 64 and every pair of them, while
# messages over several axes stay few.
MOST_AXES = 3


@dataclass(frozen=True, slots=True)
class Place:
    """Where an operator is to run, and how it is split there."""

    mesh: Mesh
    dims: Dims


def move(space: Space, strategy: Strategy, changes: Mapping[int, Place]) -> Strategy:
    """Run operators on other devices; meshes are listed anew in the data's order."""
    places = [Place(strategy.meshes[config.mesh], config.dims) for config in strategy.configs]
    for index, place in changes.items():
        places[index] = place
    meshes, number = _list_meshes(space.context, [place.mesh for place in places])
    configs = tuple(
        OperatorConfig(mesh=mesh, dims=place.dims)
        for mesh, place in zip(number, places, strict=True)
    )
    after = replace(strategy, meshes=meshes, configs=configs)
    return follow(space, strategy, after, range(len(configs)))


def _list_meshes(context: Context, wanted: list[Mesh]) -> tuple[tuple[Mesh, ...], list[int]]:
    """List a mesh per operator so that data flows to later ones: work that returns to devices gets
    another mesh there only where it must."""
    graph, meshes, number = context.graph, list[Mesh](), list[int]()
    for operator, mesh in zip(graph.operators, wanted, strict=True):
        makers = [graph.tensors[tensor].producer for tensor in operator.inputs]
        first = max((number[maker] for maker in makers if maker >= 0), default=0)
        found = next((n for n in range(first, len(meshes)) if meshes[n] == mesh), len(meshes))
        if found == len(meshes):
            meshes.append(mesh)
        number.append(found)
    return tuple(meshes), number


def refine(context: Context, strategy: Strategy) -> Strategy:
    """Return the same strategy on meshes of more axes, so that operators can be split more ways."""
    parts = [_axis_parts(mesh, context.cluster) for mesh in strategy.meshes]
    consumers = context.graph.consumers
    homes = [
        min((strategy.configs[reader].mesh for reader in consumers[tensor]), default=0)
        for tensor in context.graph.parameters
    ]

    def spread(entries: tuple[Any, ...], mesh: int) -> tuple[Any, ...]:
        pairs = zip(entries, parts[mesh], strict=True)
        return tuple(entry for entry, sizes in pairs for _ in sizes)

    return replace(
        strategy,
        meshes=tuple(map(_on_axes, strategy.meshes, parts)),
        configs=tuple(
            replace(config, dims=spread(config.dims, config.mesh)) for config in strategy.configs
        ),
        parameters=tuple(
            replace(one, rest=spread(one.rest, home), optimizer=spread(one.optimizer, home))
            for one, home in zip(strategy.parameters, homes, strict=True)
        ),
    )


def fine_mesh(devices: tuple[int, ...], cluster: Cluster) -> Mesh:
    """Return a mesh of devices with as many axes as ``refine`` makes."""
    line = Mesh(axes=("x",), sizes=(len(devices),), devices=devices)
    return _on_axes(line, _axis_parts(line, cluster))


def _on_axes(mesh: Mesh, parts: list[tuple[int, ...]]) -> Mesh:
    """Return a mesh each of whose axes is cut into factors, numbered where they are several."""
    axes = tuple(
        f"{name}{n}" if len(sizes) > 1 else name
        for name, sizes in zip(mesh.axes, parts, strict=True)
        for n in range(len(sizes))
    )
    return replace(mesh, axes=axes, sizes=tuple(itertools.chain(*parts)))


def _axis_parts(mesh: Mesh, cluster: Cluster) -> list[tuple[int, ...]]:
    """Cut axes into factors: at the edge of a host first, then the smallest prime off the last."""
    hosts = [cluster.devices[device].host for device in mesh.devices]
    near = min(hosts.count(host) for host in set(hosts))
    parts: list[tuple[int, ...]] = []
    inner = 1
    for size in reversed(mesh.sizes):
        inside = math.gcd(size, max(1, near // inner))
        cut = inside not in (1, size)
        parts.insert(0, (size // inside, inside) if cut else (size,))
        inner *= size
    for number in reversed(range(len(parts))):
        last = parts[number][-1]
        prime = smallest_prime(last)
        if sum(map(len, parts)) < MOST_AXES and prime < last:
            parts[number] = (*parts[number][:-1], last // prime, prime)
    while sum(map(len, parts)) > max(MOST_AXES, len(parts)):
        widest = max(range(len(parts)), key=lambda n: len(parts[n]))
        parts[widest] = (math.prod(parts[widest]),)
    return parts


def smallest_prime(number: int) -> int:
    """Return the smallest prime factor of a number, of 1 itself."""
    return next((p for p in range(2, number) if number % p == 0), number)
