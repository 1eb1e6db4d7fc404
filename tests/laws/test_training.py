"""Law: whatever legal strategy trains a model, it trains as one process does.

All ranks run in this process (see ``runtime/local_world.py``). ``make laws`` tries more strategies.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import Phase, given, settings

from tests.laws.models import FACTORIES, MAX_NORM, OPTIMIZER, SINGLE, model, plain
from tests.laws.strategies import Shape, random_strategy, shapes, with_wire
from tests.runtime.equivalence import assert_close
from tests.runtime.rehearsed import train_rehearsed

pytestmark = [pytest.mark.torch, pytest.mark.slow]

# Strategies per model in `make test`; in proportion when `make laws` asks for more in all.
EXAMPLES = {
    "mlp": 5, "cnn": 3, "cnn_batch_norm": 2, "inception": 2, "windows": 2, "segmentation": 2, "gpt": 3,
    "fused": 2, "bert": 2, "lstm_translation": 2, "llama": 2, "vit": 2, "experts": 2, "reporting": 2, "t5": 2,
    "hf_llama": 1, "mixtral": 2,
}  # fmt: skip
WANTED = int(os.environ.get("SHARDWRIGHT_LAWS", "0"))
FACTOR = max(1.0, WANTED / sum(EXAMPLES.values()))


def holds(name: str, shape: Shape) -> None:
    """Train a model by the strategy of a shape and compare every rank with plain PyTorch."""
    one = model(name)
    strategy = random_strategy(one.captured.graph, one.samples, shape)
    strategy = with_wire(strategy, shape.seed, "float32")
    rounds = strategy.gradient_sync.dtype == "float32"
    tolerance = max(one.tolerance, SINGLE) if rounds else one.tolerance
    max_norm = MAX_NORM if shape.clips else None
    runs, _ = train_rehearsed(
        one.captured, strategy, one.module, one.batch, OPTIMIZER, max_norm, shape.streams
    )
    assert len(runs) == len(strategy.devices)
    for run in runs:
        assert_close(run, plain(name, shape.clips), str(shape), tolerance)


@pytest.mark.parametrize("name", FACTORIES)
def test_every_strategy_trains_as_one_process(name: str) -> None:
    @settings(
        max_examples=round(EXAMPLES[name] * FACTOR),
        # The same strategies every time in `make test`, others every time in `make laws`.
        derandomize=WANTED == 0,
        database=None,
        deadline=None,
        # A Shape is small as it is, and shrinking one trains hundreds of others.
        phases=(Phase.generate,),
    )
    @given(shape=shapes())
    def law(shape: Shape) -> None:
        holds(name, shape)

    law()


# Shapes that once failed.
def test_a_number_that_was_expanded_travels() -> None:
    holds("t5", Shape(sizes=(2,), stages=4, num_microbatches=4, wildness=1.0, seed=2))


def test_a_view_of_a_gathered_parameter_outlives_it() -> None:
    holds("vit", Shape(sizes=(2, 2), wildness=0.5, shuffles=True, seed=4))


def test_an_initial_state_is_cut_into_microbatches() -> None:
    holds("lstm_translation", Shape(sizes=(8,), num_microbatches=4, wildness=1.0, seed=5))


@pytest.mark.parametrize(("wildness", "seed"), [(0.1, 0), (1.0, 1)])
def test_tied_parameters_travel_between_stages(wildness: float, seed: int) -> None:
    holds("gpt", Shape(sizes=(2, 2), stages=2, wildness=wildness, seed=seed))
