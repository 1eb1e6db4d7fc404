"""Law: what holds for ranks that are threads holds for processes, and for hosts on slow links.

``make laws`` runs 50 random strategies of eight ranks; `make test` a few of four: each captures the models.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import Phase, assume, given, settings

from shardwright.core.schedules import SCHEDULES
from tests.hosts import hosts, why_not
from tests.laws.models import FACTORIES
from tests.laws.remote import Case, holds, holds_on_host
from tests.laws.strategies import Shape, shapes
from tests.runtime.world import run_hosts, run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
MANY = "SHARDWRIGHT_LAWS" in os.environ


def cases(names: list[str], num_ranks: int, count: int) -> list[Case]:
    """Return ``count`` random shapes of ``num_ranks`` ranks, dealt out to the models in turn."""
    drawn: list[Shape] = []

    @settings(
        max_examples=count, derandomize=not MANY, database=None, deadline=None,
        phases=(Phase.generate,),
    )  # fmt: skip
    @given(shape=shapes(num_ranks, num_ranks))
    def draw(shape: Shape) -> None:
        # A folded pipeline has two stages on each device, and the smallest model four blocks.
        assume(not SCHEDULES[shape.schedule].folds or shape.stages <= 2)
        drawn.append(shape)

    draw()
    dealt = [(names[place % len(names)], shape) for place, shape in enumerate(drawn)]
    return sorted(dealt, key=lambda case: names.index(case[0]))


def test_random_strategies_of_many_processes_train_as_one() -> None:
    names, count = (list(FACTORIES), 8) if MANY else (["gpt"], 4)
    tried = cases(names, count, 50 if MANY else 4)
    messages = run_ranks(count, holds, tried, timeout=1500 if MANY else 110)
    assert len(set(messages)) == 1
    assert messages[0] > len(tried)


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "hosts can be made")
def test_random_strategies_on_several_hosts_train_as_one() -> None:
    names = list(FACTORIES) if MANY else ["mlp", "lstm_translation"]
    # Two hosts in `make test`: there the guide to hosts, step by step, trains on four.
    count = 4 if MANY else 2
    tried = cases(names, count, 22 if MANY else 4)
    with hosts(count, prefix=f"swl{os.getpid() % 10000}") as found:
        messages = run_hosts(found, holds_on_host, tried, timeout=1500 if MANY else 110)
    assert len(set(messages)) == 1
    assert messages[0] > len(tried)
