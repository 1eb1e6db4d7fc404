"""Judging a changed strategy from those before against judging it from nothing: `python benchmarks/delta.py`.

A Metropolis chain over the splits of operators, as FlexFlow's search makes them, on four families at 8
to 64 devices. Every proposal is judged twice: lowered, priced and simulated from scratch, and by
`Incremental`, which begins with what it made of the strategies before. The two must say the same to
the last bit. Times are of the processor, with the collection of garbage put off until between
moves; both ways are timed on the same moves in turn. Simulating alone is timed by `simulator.py`.

It can be run in parts: `--save FILE` adds every chain to a file as it ends, and `--join FILE ...` shows
the tables of all the chains in such files together, without running any.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random

import numpy as np
import torch
from processor import processor_name
from rich.console import Console
from rich.table import Table

from shardwright import __version__
from shardwright.core.costs import CostTable
from shardwright.core.graph import OperatorGraph
from shardwright.core.strategy import GradientSync, ParameterConfig, Strategy
from shardwright.files.clusterfile import parse_cluster
from shardwright.operators.splitting.iteration import PLUS
from shardwright.planner.judge.evaluate import Evaluation, evaluate
from shardwright.planner.judge.incremental import Incremental
from shardwright.planner.model.context import Context
from shardwright.planner.model.training import Training
from shardwright.planner.space import Seed, seed_strategy
from shardwright.planner.space.configs import choices, wanted_as
from shardwright.runtime.capture import capture, load_model

HERE = Path(__file__).resolve().parent
FAMILIES = {
    "GPT": ("hf:gpt2", 512),
    "ResNet": ("hf:resnet-50", 0),
    "Inception": (f"{HERE / 'inception.py'}:inception", 0),
    "encoder-decoder": ("hf:t5-small", 128),
}
CLUSTERS = {
    "1x8xH100": Seed(data=8),
    "2x8xH100": Seed(data=4, tensor=4),
    "8x8xH100": Seed(data=8, tensor=8),
}
GLOBAL_BATCH = 64
MEDIAN_BAR, BEST_BAR, WORST_BAR = 4.0, 10.0, 0.95


@dataclass(slots=True)
class Chain:
    """One chain's seconds per move, both ways, and how often they differed."""

    family: str
    cluster: str
    full: list[float] = field(default_factory=list[float])
    delta: list[float] = field(default_factory=list[float])
    differed: int = 0
    refused: int = 0

    @property
    def ratios(self) -> list[float]:
        """How many times as fast, move by move."""
        return [one / other for one, other in zip(self.full, self.delta, strict=True)]


class Moves:
    """Proposals: one operator, drawn uniformly, is split in a way drawn uniformly."""

    def __init__(self, context: Context, seed: int) -> None:
        self.context = context
        self.random = Random(seed)
        graph = context.graph
        self.iterations = [context.facts.iteration(index) for index in range(len(graph.operators))]

    def propose(self, strategy: Strategy) -> Strategy:
        """Return a strategy in which one operator is split otherwise."""
        graph, random = self.context.graph, self.random
        while True:
            index = random.randrange(len(graph.operators))
            config = strategy.configs[index]
            every = choices(
                self.iterations[index], strategy.meshes[config.mesh].sizes,
                self.context.facts.samples.operator_dim[index], strategy.pipeline.num_microbatches,
            )  # fmt: skip
            dims = random.choice([dims for dims in every if PLUS not in dims])
            if dims != config.dims:
                break
        configs, parameters = list(strategy.configs), list(strategy.parameters)
        configs[index] = replace(config, dims=dims)
        for position, tensor in enumerate(graph.parameters):
            if graph.consumers[tensor][:1] == (index,):
                use = wanted_as(graph, self.context.facts.samples, tensor, configs)
                parameters[position] = ParameterConfig(rest=use, optimizer=use)
        return replace(strategy, configs=tuple(configs), parameters=tuple(parameters))


def timed(act: Callable[[], Evaluation]) -> tuple[Evaluation | None, float]:
    """Return what comes of it, None where it is refused, and the processor's seconds."""
    begin = time.process_time()
    try:
        result = act()
    except ValueError:
        result = None
    return result, time.process_time() - begin


def said(judged: Evaluation | None) -> object:
    """Return all that a verdict says."""
    if judged is None:
        return None
    return judged.objective, judged.stage_bytes, judged.sources


def walk(graph: OperatorGraph, family: str, cluster: str, moves: int) -> Chain:
    """Judge a chain's proposals both ways; accept by time, at 2 % of it as temperature."""
    context = Context.of(graph, parse_cluster(cluster), CostTable(), Training())
    strategy = start(context, cluster)
    proposals, incremental = Moves(context, seed=1), Incremental(context)
    incremental.evaluate(strategy)
    current = evaluate(context, strategy).seconds
    chain = Chain(family, cluster)
    gc.collect()
    gc.disable()
    for number in range(moves):
        other = proposals.propose(strategy)
        ways = [lambda s=other: evaluate(context, s), lambda s=other: incremental.evaluate(s)]
        order = (0, 1) if number % 2 else (1, 0)
        results = {way: timed(ways[way]) for way in order}
        (full, full_seconds), (delta, delta_seconds) = results[0], results[1]
        chain.differed += said(full) != said(delta)
        if full is None:
            chain.refused += 1
        else:
            chain.full.append(full_seconds)
            chain.delta.append(delta_seconds)
            worse = (full.seconds / current - 1) / 0.02
            if worse <= 0 or proposals.random.random() < math.exp(-worse):
                strategy, current = other, full.seconds
        if number % 50 == 49:
            gc.collect()
    gc.enable()
    return chain


def start(context: Context, cluster: str) -> Strategy:
    """Return the strategy that the chain begins with."""
    strategy = seed_strategy(context.graph, CLUSTERS[cluster], context.facts.samples)
    return replace(strategy, gradient_sync=GradientSync())


def show(console: Console, chains: list[Chain]) -> bool:
    """Print a row per chain and the bars; return whether all of them are reached."""
    table = Table(
        title="Lowered, priced and simulated: from scratch, and from the strategies before"
    )
    for name in ("family", "cluster", "moves", "differ", "full ms", "delta ms", "faster", "5 %",
                 "worst"):  # fmt: skip
        table.add_column(name, justify="left" if name in ("family", "cluster") else "right")
    medians: list[float] = []
    for chain in chains:
        ratios = sorted(chain.ratios)
        medians.append(statistics.median(ratios))
        table.add_row(
            chain.family, chain.cluster, str(len(ratios)), str(chain.differed),
            f"{1e3 * statistics.median(chain.full):.1f}",
            f"{1e3 * statistics.median(chain.delta):.1f}",
            f"{medians[-1]:.1f}", f"{ratios[len(ratios) // 20]:.1f}", f"{ratios[0]:.2f}",
        )  # fmt: skip
    console.print(table)
    every = [ratio for chain in chains for ratio in chain.ratios]
    moves, differed = len(every), sum(chain.differed for chain in chains)
    bars = (
        (f"{moves} moves, of which {differed} differ", differed == 0),
        (f"median {statistics.median(every):.1f} x, bar {MEDIAN_BAR}",
         statistics.median(every) >= MEDIAN_BAR),
        (f"best chain {max(medians):.1f} x, bar {BEST_BAR}", max(medians) >= BEST_BAR),
        (f"worst move {min(every):.2f} x, bar {WORST_BAR}", min(every) >= WORST_BAR),
    )  # fmt: skip
    for text, reached in bars:
        console.print(f"{text}: {'reached' if reached else 'missed'}")
    return all(reached for _, reached in bars)


def main() -> int:
    """Walk, print, and fail where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--moves", type=int, default=10_000, help="of all chains together")
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--clusters", default=",".join(CLUSTERS))
    parser.add_argument("--save", type=Path, help="add every chain to this file")
    parser.add_argument("--join", type=Path, nargs="*", help="only show the chains in these files")
    options = parser.parse_args()
    console = Console(width=110)
    if options.join:
        lines = [line for path in options.join for line in path.read_text().splitlines()]
        return 0 if show(console, [Chain(**json.loads(line)) for line in lines]) else 1
    families, clusters = options.families.split(","), options.clusters.split(",")
    each = -(-options.moves // (len(families) * len(clusters)))
    chains: list[Chain] = []
    for family in families:
        model, length = FAMILIES[family]
        source = load_model(model)
        batch = source.example(2, length) if length else source.example(2)
        graph = capture(source.build(), batch, global_batch=GLOBAL_BATCH, name=family).graph
        for cluster in clusters:
            chains.append(walk(graph, family, cluster, each))
            if options.save:
                with options.save.open("a") as file:
                    file.write(json.dumps(asdict(chains[-1])) + "\n")
            console.print(f"{family} on {cluster}: {len(graph.operators)} operators, {each} moves")
    reached = show(console, chains)
    console.print(
        f"Command: python benchmarks/delta.py --moves {options.moves}. {processor_name()}; "
        f"{platform.system()}; Python {platform.python_version()}, NumPy {np.__version__}, torch "
        f"{torch.__version__}, shardwright {__version__}; global batch {GLOBAL_BATCH}. Costs are "
        "modelled; nothing is measured on such devices here."
    )
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
