"""Parameters with a mesh of their own: what is refused, and what files and digests say of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwright.core.codec import decode, encode
from shardwright.core.legality import check_against, check_alone
from shardwright.core.plan import digest_of
from shardwright.core.strategy import ParameterConfig, Pipeline, Strategy
from shardwright.errors import InputError
from shardwright.planner.space import Seed, seed_strategy
from shardwright.planner.space.servers import with_servers
from tests.planner.search.models import mlp

GRAPH = mlp()
SERVED = with_servers(seed_strategy(GRAPH, Seed(data=2)), (0,), (1, 2))


def on(mesh: int, **changes: bool) -> Strategy:
    kept = replace(SERVED.parameters[0], mesh=mesh, **changes)
    return replace(SERVED, parameters=(kept,) * len(SERVED.parameters))


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        (on(2), r"meshes 0 to 1, .* but one is to lie on 2; name a mesh of the list"),
        (on(-2), "but one is to lie on -2"),
        (on(0, keeps=True), "keeps is true; set it to false"),
        (replace(SERVED, updates="ready"), "updates is ready; update by step"),
        (replace(SERVED, pipeline=Pipeline(schedule="zb-h1")), "schedule is zb-h1; choose one"),
        (
            replace(SERVED, gradient_sync=replace(SERVED.gradient_sync, compressor="int8")),
            "they are compressed .int8.; leave out the compressor",
        ),
    ],
)
def test_what_servers_cannot_do_is_refused_with_a_remedy(strategy: Strategy, said: str) -> None:
    with pytest.raises(InputError, match=said):
        check_alone(strategy)


def test_a_home_is_listed_before_the_meshes_of_use() -> None:
    behind = replace(
        SERVED,
        meshes=SERVED.meshes[::-1],
        configs=tuple([replace(config, mesh=0) for config in SERVED.configs]),
        parameters=tuple([replace(one, mesh=1) for one in SERVED.parameters]),
    )
    with pytest.raises(InputError, match=r"lies on mesh 1 and is used on mesh 0; list the servers"):
        check_against(behind, GRAPH)


def test_a_home_is_written_where_there_is_one_and_tells_digests_apart() -> None:
    assert "mesh" not in encode(ParameterConfig(rest=(-1,), optimizer=(-1,)))
    assert decode(Strategy, encode(SERVED)) == SERVED
    assert digest_of(on(1)) != digest_of(SERVED)
