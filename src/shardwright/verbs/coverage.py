"""How much of a model can be split: by rules, by cost, and by trying it.

Costs are modelled on one published device, whole operators, forward and backward; only their ratios
matter here. What a plan really costs is for the search and the simulator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from shardwright.core.costs import CostTable
from shardwright.core.graph import OperatorGraph
from shardwright.core.strategy import Precision, Strategy
from shardwright.errors import RunError
from shardwright.files.clusterfile import parse_cluster
from shardwright.files.planfile import Unruled
from shardwright.operators.splitting import find_samples, has_rule, iterate
from shardwright.operators.splitting.iteration import PLUS, Iteration
from shardwright.planner.cost import ShardPrices
from shardwright.planner.lower import lower
from shardwright.planner.space import Seed, choices, seed_strategy
from shardwright.planner.space.configs import placements
from shardwright.planner.space.seeds import parameter_configs
from shardwright.verbs.results import Coverage

DEVICE = "1x2xH100"  # the device on which costs are modelled
BATCH, STEPS = 4, 2  # of a proof

Splits = Callable[[OperatorGraph], Strategy]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """How one strategy trained on two ranks, beside plain PyTorch.

    ``split_share`` is the share of modelled cost in operators that the strategy splits.
    ``difference`` is that of the worst tensor or loss, relative; ``tolerance`` says how far rounding
    may take it: further where the model itself computes in float32.
    """

    precision: Precision
    split_share: float
    difference: float
    tolerance: float

    @property
    def is_equal(self) -> bool:
        """Whether it trained as one process does."""
        return self.difference <= self.tolerance


def coverage(graph: OperatorGraph) -> Coverage:
    """Say which operators can be split, and which will run replicated, with their cost."""
    missing = Counter(op.kind for op in graph.operators if not has_rule(op.kind))
    total = len(graph.operators)
    seconds = operator_seconds(graph)
    spent = dict.fromkeys(missing, 0.0)
    for operator, one in zip(graph.operators, seconds, strict=True):
        if operator.kind in spent:
            spent[operator.kind] += one
    unruled = [
        Unruled(kind=kind, count=count, share=min(1.0, spent[kind] / (sum(seconds) or 1.0)))
        for kind, count in missing.items()
    ]
    return Coverage(
        num_operators=total,
        num_with_rule=total - sum(missing.values()),
        replicated=tuple(sorted(unruled, key=lambda one: (-one.share, -one.count, one.kind))),
        replicated_share=_share(seconds, lambda index: not iterate(graph, index).dims),
    )


def cost_share(graph: OperatorGraph, counts: Callable[[int], bool]) -> float:
    """Return the share of modelled cost in the operators that count, between 0 and 1."""
    return _share(operator_seconds(graph), counts)


def _share(seconds: list[float], counts: Callable[[int], bool]) -> float:
    total = sum(seconds)
    return sum(one for i, one in enumerate(seconds) if counts(i)) / total if total else 0.0


def operator_seconds(graph: OperatorGraph) -> list[float]:
    """Return the modelled seconds of every operator, whole, forward and backward, without launches.

    A launch takes as long for a number as for a small tensor, and says nothing about splitting.
    """
    device = parse_cluster(DEVICE)
    kinds = tuple(replace(kind, launch_seconds=0.0) for kind in device.kinds)
    prices = ShardPrices(replace(device, kinds=kinds), CostTable())
    rates = prices.rates(0, "float32")

    def seconds(index: int) -> float:
        operator = graph.operators[index]
        inputs = tuple(graph.tensors[tensor].shape for tensor in operator.inputs)
        outputs = tuple(graph.tensors[tensor].shape for tensor in operator.outputs)
        sort = prices.sort(graph, index)
        phases = [
            prices.cost(graph, index, sort, (inputs, outputs), phase, rates).seconds
            for phase in ("forward", "backward")
        ]
        return sum(phases)

    return [seconds(index) for index in range(len(graph.operators))]


# -- strategies to try -------------------------------------------------------------------------------


def data_parallel(graph: OperatorGraph) -> Strategy:
    """Two devices, each half of the samples."""
    return seed_strategy(graph, Seed(data=2))


def tensor_parallel(graph: OperatorGraph) -> Strategy:
    """Two devices, each half of the columns and rows that Megatron's pattern finds."""
    return seed_strategy(graph, Seed(tensor=2))


def random_splits(graph: OperatorGraph) -> Strategy:
    """Two devices; every operator split along a dim of its own, drawn at random."""
    return random_strategy(graph, 1)


def random_strategy(graph: OperatorGraph, seed: int) -> Strategy:
    """Return data parallelism with the dim of every operator replaced by a random legal one."""
    random, samples = Random(seed), find_samples(graph)
    base = data_parallel(graph)
    iterations = samples.iterations
    sizes = base.meshes[0].sizes
    configs = [
        # Partial sums could only be passed on where they are made, halos only from large pieces.
        replace(config, dims=random.choice([c for c in legal if _is_free(iterations[i], c)]))
        for i, config, legal in (
            (i, config, choices(iterations[i], sizes, samples.operator_dim[i]))
            for i, config in enumerate(base.configs)
        )
    ]
    parameters = parameter_configs(graph, samples, configs, base.meshes[0], Seed())
    return replace(base, configs=tuple(configs), parameters=parameters, label="random splits")


def _is_free(iteration: Iteration, dims: tuple[str, ...]) -> bool:
    needs_halo = any(pair.halos for pair in placements(iteration, dims).inputs)
    return PLUS not in dims and not needs_halo


def try_training(model: str, splits: Splits, seq: int | None = None) -> Proof:
    """Train a model on two ranks of this process, and beside it with plain PyTorch, in float64.

    In float32 where the model cannot train in float64. Dropout is off: masks depend on who draws
    them. Batch norm takes its statistics over the whole batch. Raises what capture, lowering or
    training raise.
    """
    try:
        return _train_beside(model, splits, seq, "float64")
    except (RuntimeError, RunError):  # a kernel without float64, or a model that changes dtypes
        return _train_beside(model, splits, seq, "float32")


def _train_beside(model: str, splits: Splits, seq: int | None, precision: Precision) -> Proof:
    from shardwright.runtime import verify
    from shardwright.runtime.capture import capture, load_model
    from shardwright.runtime.train import build_seeded

    source = load_model(model)
    module = build_seeded(verify.exact_source(source))
    batches = verify.exact_batches(source, BATCH, seq, STEPS)
    if precision == "float32":
        module.float()
        batches = [verify.in_single(batch) for batch in batches]
    verify.switch_off_dropout(module)
    captured, _ = verify.without_dropout(
        module, capture(module, batches[0], batch_norm="synchronised")
    )
    strategy = splits(captured.graph)
    program = lower(captured.graph, strategy)
    yardstick = verify.train_plainly(module, batches, clips=False, tell=_ignore)
    ranks = verify.train_here(captured, program, module, batches, _ignore)
    worst = verify.gaps(ranks, yardstick, captured)[0]
    exact = verify.is_exact(captured)
    return Proof(
        precision=precision,
        split_share=cost_share(captured.graph, lambda index: any(strategy.configs[index].dims)),
        difference=worst.difference,
        tolerance=verify.TOLERANCE if exact else verify.SINGLE_TOLERANCE,
    )


def _ignore(_: int) -> None:
    """Nobody watches."""
