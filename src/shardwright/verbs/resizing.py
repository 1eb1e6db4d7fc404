"""A strategy for the same model at another batch size: the last batch of a data set is short.

Devices keep sharing the samples as far as these divide. Along the axes where they do not, every
device does the same work, which is exact and takes as long as on one of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from string import digits

from shardwright.core.graph import OperatorGraph
from shardwright.core.strategy import OperatorConfig, Pipeline, Strategy
from shardwright.errors import InputError
from shardwright.operators.splitting.iteration import PLUS
from shardwright.operators.splitting.samples import Samples, find_samples
from shardwright.planner.space.configs import is_choice


def resize(graph: OperatorGraph, other: OperatorGraph, strategy: Strategy) -> Strategy:
    """Return the strategy of ``graph`` for ``other``, the same model at another batch size.

    As many devices as possible share the samples; there are as many microbatches as keep each of
    them no larger than planned. Raises InputError where the graphs differ in more than sizes.
    """
    _check_alike(graph, other)
    planned, given = _sizes(graph, other)
    if planned == given:
        return strategy
    fit = _Fit.of(graph, other, strategy)
    axes = fit.sample_axes()
    widths = {
        kept: max(math.prod(_kept_sizes(mesh.axes, mesh.sizes, kept)) for mesh in strategy.meshes)
        for kept in _subsets(axes)
    }
    room = max(planned // (strategy.pipeline.num_microbatches * widths[axes]), 1)
    for kept in sorted(widths, key=lambda one: (-widths[one], sorted(one))):
        for count in _counts(given, given // widths[kept], room, fit.samples):
            configs = fit.configs(axes - kept, count)
            if configs is not None:
                return replace(strategy, configs=configs, pipeline=_cut(strategy.pipeline, count))
    return replace(strategy, configs=fit.loosened(axes), pipeline=_cut(strategy.pipeline, 1))


def _cut(pipeline: Pipeline, count: int) -> Pipeline:
    """Return a pipeline for so many microbatches."""
    order = (_cut_line(line, pipeline.num_microbatches, count) for line in pipeline.order)
    return replace(pipeline, num_microbatches=count, order=tuple(map(" ".join, order)))


def _cut_line(line: str, planned: int, count: int) -> Iterator[str]:
    """Go through a line of an order again for microbatches behind its last, and leave out those that there are not:
    what an action waits for is of its own microbatch, so the rest can still run."""
    for begin in range(0, count, planned):
        for word in line.split():
            action = word.rstrip(digits)
            number = begin + int(word.removeprefix(action))
            if number < count:
                yield f"{action}{number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fit:
    """A strategy, what it was made for, and what it is to fit now."""

    strategy: Strategy
    before: Samples
    samples: Samples

    @classmethod
    def of(cls, graph: OperatorGraph, other: OperatorGraph, strategy: Strategy) -> _Fit:
        """Look at both graphs."""
        return cls(
            strategy=strategy,
            before=find_samples(graph),
            samples=find_samples(other),
        )

    def sample_axes(self) -> frozenset[str]:
        """Return the names of the axes along which devices share samples."""
        meshes = self.strategy.meshes
        return frozenset(
            axis
            for config, sample in zip(self.strategy.configs, self.before.operator_dim, strict=True)
            for axis, name in zip(meshes[config.mesh].axes, config.dims, strict=True)
            if sample and name == sample
        )

    def configs(self, dropped: frozenset[str], count: int) -> tuple[OperatorConfig, ...] | None:
        """Return the configs with whole samples along ``dropped`` axes and so many microbatches;
        None where one of them cannot be."""
        found: list[OperatorConfig] = []
        for index, config in enumerate(self.strategy.configs):
            dims = self._dims(index, dropped)
            sizes = self.strategy.meshes[config.mesh].sizes
            sample = self.samples.operator_dim[index]
            if not is_choice(self.samples.iterations[index], dims, sizes, sample, count):
                return None
            found.append(config if dims == config.dims else replace(config, dims=dims))
        return tuple(found)

    def loosened(self, dropped: frozenset[str]) -> tuple[OperatorConfig, ...]:
        """Return configs in which every operator that cannot be split as it was runs whole."""
        meshes = self.strategy.meshes
        whole: set[int] = set()
        for index, config in enumerate(self.strategy.configs):
            dims, sizes = self._dims(index, dropped), meshes[config.mesh].sizes
            if not is_choice(self.samples.iterations[index], dims, sizes):
                whole.add(index)
                named = zip(meshes[config.mesh].axes, dims, strict=True)
                dropped |= {axis for axis, name in named if name}
        return tuple(
            [
                replace(
                    config,
                    dims=("",) * len(config.dims) if index in whole else self._dims(index, dropped),
                )
                for index, config in enumerate(self.strategy.configs)
            ]
        )

    def _dims(self, index: int, dropped: frozenset[str]) -> tuple[str, ...]:
        """Return an operator's dims without samples along ``dropped`` axes, nor the partial sums over
        samples that were handed on there."""
        config = self.strategy.configs[index]
        gone = {self.before.operator_dim[index], self.samples.operator_dim[index], PLUS}
        axes = self.strategy.meshes[config.mesh].axes
        return tuple(
            [
                "" if axis in dropped and name in gone else name
                for axis, name in zip(axes, config.dims, strict=True)
            ]
        )


def _check_alike(graph: OperatorGraph, other: OperatorGraph) -> None:
    """Refuse a graph with other operators."""
    one, two = (
        (
            [(op.kind, op.inputs, op.outputs) for op in each.operators],
            [(tensor.role, tensor.dtype) for tensor in each.tensors],
            [(block.start, block.stop) for block in each.blocks],
        )
        for each in (graph, other)
    )
    if one != two:
        raise InputError(
            "a batch of another size must lead through the same operators, but the model has "
            f"{len(graph.operators)} at the batch that was planned and {len(other.operators)}, or others,"
            " at this one; leave it out (drop_last=True), fill it up, or plan for its size"
        )


def _sizes(graph: OperatorGraph, other: OperatorGraph) -> tuple[int, int]:
    """Return how many samples both have."""
    for index in graph.inputs:
        one, two = graph.tensors[index].shape, other.tensors[index].shape
        if one != two:
            return one[0], two[0]
    return 0, 0


def _subsets(axes: frozenset[str]) -> Iterator[frozenset[str]]:
    for count in range(len(axes) + 1):
        yield from map(frozenset, itertools.combinations(sorted(axes), count))


def _kept_sizes(axes: tuple[str, ...], sizes: tuple[int, ...], kept: frozenset[str]) -> list[int]:
    return [size for axis, size in zip(axes, sizes, strict=True) if axis in kept]


def _counts(given: int, share: int, room: int, samples: Samples) -> list[int]:
    """Return numbers of microbatches to try, best first; ``share`` are a device's samples."""
    if samples.blocker:
        return [1]
    counts = [count for count in range(1, given + 1) if given % count == 0]
    small = [count for count in counts if share <= room * count]
    return [*small, *[count for count in reversed(counts) if count not in small]]
