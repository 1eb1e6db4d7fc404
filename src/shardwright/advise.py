"""How to configure a run, from Python: the same answers as ``shardwright advise``, and what they are made of."""

from shardwright.core.advice import Advice, Curve
from shardwright.core.algorithms import Algorithm, AlgorithmChoice, AlgorithmTable, LayerAlgorithms
from shardwright.core.noise import NoiseScale, Tradeoff
from shardwright.core.scaling import Exchanged, Overhead, fit_overhead, largest_ratio
from shardwright.layerwise.algorithms import Frontier, frontier

__all__ = [
    "Advice", "Algorithm", "AlgorithmChoice", "AlgorithmTable", "Curve", "Exchanged", "Frontier",
    "LayerAlgorithms", "NoiseScale", "Overhead", "Tradeoff", "fit_overhead", "frontier", "largest_ratio",
]  # fmt: skip
