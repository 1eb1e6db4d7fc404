"""One check of legality between every strategy and everything that uses it.

Wherever a strategy comes from, a file, a search, another program: what passes here can be lowered,
and what is lowered trains as one process does. A value that no device owns or a gradient that nobody
sums cannot come about, since layouts follow from the rules of operators; what is left to check is
that the rules offer every split, that sizes divide, that partial sums are there where they are to
pass, and that data flows to later meshes.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.core.graph import OperatorGraph
from shardwright.core.legality import check_against, check_alone, divisors, numbers
from shardwright.core.strategy import Mesh, OperatorConfig, Strategy
from shardwright.errors import InputError
from shardwright.operators.splitting.iteration import PLUS, Dim, Iteration, pieces_by_dim
from shardwright.operators.splitting.samples import Samples
from shardwright.planner.space.configs import is_choice, placements, summed_over


def check_strategy(
    graph: OperatorGraph,
    strategy: Strategy,
    samples: Samples,
) -> None:
    """Raise InputError, with rule, values and remedy, where a strategy cannot be meant for a graph.

    Linear in operators; cheap beside lowering.
    """
    check_alone(strategy)
    check_against(strategy, graph)
    check_pipeline(strategy, samples)
    iterations = samples.iterations
    _check_pieces(strategy, samples)
    _check_splits(graph, strategy, samples, iterations)
    trained = depend_on_parameters(graph)
    where = meshes_of_operators(graph, strategy.configs, trained)
    _check_own(graph, strategy, iterations)
    _check_sums(graph, strategy, samples, iterations, where)


def _check_own(graph: OperatorGraph, strategy: Strategy, iterations: Sequence[Iteration]) -> None:
    """Check that a pipeline that is never flushed has every trained parameter on one stage, where operators
    read it as it rests: that is what there are versions of."""
    if strategy.pipeline.is_flushed:
        return
    for tensor, config in zip(graph.parameters, strategy.parameters, strict=True):
        spec, readers = graph.tensors[tensor], graph.consumers[tensor]
        if not spec.needs_gradient:
            continue
        used = {strategy.configs[reader].mesh for reader in readers}
        if len(used) > 1:
            raise InputError(
                "in an asynchronous pipeline every stage updates its own parameters at once, but "
                f"{spec.name} is used by stages {numbers(sorted(used))}, whose gradients "
                'would have to meet; untie it, put its uses on one stage, or set staleness to "none"'
            )
        for reader in readers:
            inputs = placements(iterations[reader], strategy.configs[reader].dims).inputs
            for place, read in enumerate(graph.operators[reader].inputs):
                if read == tensor and inputs[place].value != config.rest:
                    raise InputError(
                        "in an asynchronous pipeline operators read parameters as these rest, but "
                        f"{spec.name} rests as {config.rest} and {graph.operators[reader].name} reads it "
                        f"as {inputs[place].value}; let it rest so, split all that read it alike, or set "
                        'staleness to "none"'
                    )


def check_pipeline(strategy: Strategy, samples: Samples) -> None:
    """Check what microbatches and schedule forbid."""
    pipeline = strategy.pipeline
    if pipeline.num_microbatches == 1:
        return
    if samples.blocker:
        raise InputError(
            f"more than one microbatch is impossible: {samples.blocker}; plan with one"
        )
    is_alone = len(strategy.meshes) == 1 and pipeline.schedule == "1f1b"
    if not is_alone and any(config.keeps for config in strategy.parameters):
        raise InputError(
            "parameters are kept from forward to backward only where one microbatch is under way at "
            f"a time, but there are {len(strategy.meshes)} stages in {pipeline.schedule} order; "
            "gather them again (keeps=False)"
        )


def _check_pieces(strategy: Strategy, samples: Samples) -> None:
    """Check that microbatches cut whatever carries samples into equal pieces."""
    pieces, common = strategy.pipeline.num_microbatches, samples.common
    if common % pieces:
        raise InputError(
            f"all microbatches are of one size, but {common:,} samples do not divide into "
            f"{pieces:,}; num_microbatches may be {numbers(divisors(common))}"
        )


def _check_splits(
    graph: OperatorGraph, strategy: Strategy, samples: Samples, iterations: Sequence[Iteration]
) -> None:
    """Check that the rule of every operator offers its split."""
    pieces, known = strategy.pipeline.num_microbatches, set[object]()
    for index, config in enumerate(strategy.configs):
        iteration, sample = iterations[index], samples.operator_dim[index]
        key = (id(iteration), config, sample)
        if key in known:
            continue
        mesh = strategy.meshes[config.mesh]
        if not is_choice(iteration, config.dims, mesh.sizes, sample, pieces):
            operator = graph.operators[index]
            raise InputError(
                f"an operator is split as its rule offers, but {operator.name} ({operator.kind}) "
                f"{_fault(iteration, config, mesh, sample, pieces)}"
            )
        known.add(key)


def _fault(
    iteration: Iteration, config: OperatorConfig, mesh: Mesh, sample: str, pieces: int
) -> str:
    """Say why a split is none that the rule offers, and what to do."""
    names = [*(dim.name for dim in iteration.dims), *([PLUS] if iteration.linear else [])]
    offered = ", ".join(map(repr, names)) or "none"
    for axis, size, name in zip(mesh.axes, mesh.sizes, config.dims, strict=True):
        if name not in ("", *names):
            return f'has no dim {name[:40]!r} for axis {axis!r}; its dims are {offered}, or ""'
        if size == 1 and name:
            return f'is split over axis {axis!r}, which has one device; write "" there'
    faults = (
        _fault_along(iteration.dim(name), count, pieces if name == sample else 1)
        for name, count in pieces_by_dim(config.dims, mesh.sizes).items()
    )
    return next(filter(None, faults), f"does not split as {config.dims}; its dims are {offered}")


def _fault_along(dim: Dim, count: int, microbatches: int) -> str:
    """Say why a dim does not split into so many pieces in each of some microbatches, "" if it does."""
    size = dim.size // microbatches
    if size % count:
        each = f" in each of {microbatches} microbatches" if microbatches > 1 else ""
        return (
            f"has {size:,} along {dim.name!r}{each}, which do not divide into {count:,}; split "
            f"it into {numbers(divisors(size))}"
        )
    if dim.most and count > dim.most:
        return (
            f"splits along {dim.name!r} into at most {dim.most:,} pieces, since smaller ones are "
            f"shorter than their halos, not {count:,}; split it into fewer"
        )
    return ""


# Kinds of operators with results that may also write the buffers they are given.
_WRITERS = ("opaque.", "rowwise.", "aten.batch_norm.")


def depend_on_parameters(graph: OperatorGraph) -> list[bool]:
    """Say of every operator whether what it makes depends on what steps change: parameters, buffers that
    are written."""
    written = graph.written_buffers(*_WRITERS)
    known = [
        tensor.role == "parameter" or index in written for index, tensor in enumerate(graph.tensors)
    ]
    result: list[bool] = []
    for operator in graph.operators:
        result.append(any(known[tensor] for tensor in operator.inputs))
        for tensor in operator.outputs:
            known[tensor] = result[-1]
    return result


def meshes_of_operators(
    graph: OperatorGraph, configs: Sequence[OperatorConfig], trained: Sequence[bool]
) -> list[set[int]]:
    """Say on which meshes each operator runs: work without parameters is repeated, not sent.

    Raises InputError where data would flow to an earlier mesh, or where a buffer that is written would
    be on several meshes, of which one writes it.
    """
    where: list[set[int]] = [set() for _ in graph.operators]
    for index in reversed(range(len(where))):
        meshes = {mesh for reader in graph.readers(index) for mesh in where[reader]}
        own = configs[index].mesh
        where[index] = {own} if trained[index] or not meshes else meshes
        if trained[index] and min(meshes, default=own) < own:
            raise InputError(
                f"data must flow to later meshes, but operator {graph.operators[index].name} on "
                f"mesh {own} feeds mesh {min(meshes)}; list the meshes in the data's order"
            )
    _check_written(graph, where)
    return where


def _check_written(graph: OperatorGraph, where: Sequence[set[int]]) -> None:
    """Check that whatever reads or writes a buffer that a step writes runs on one mesh."""
    if len(set[int]().union(*where)) < 2:
        return
    for tensor in sorted(graph.written_buffers(*_WRITERS)):
        used = set[int]().union(*(where[one] for one in graph.consumers[tensor]))
        if len(used) > 1:
            raise InputError(
                "a buffer that a step writes must be used on one mesh, or others would read what stood "
                f"there before, but {graph.tensors[tensor].name} is used on meshes "
                f"{numbers(sorted(used))}; put what reads and writes it on one stage"
            )


def _check_sums(
    graph: OperatorGraph,
    strategy: Strategy,
    samples: Samples,
    iterations: Sequence[Iteration],
    where: Sequence[set[int]],
) -> None:
    """Check that partial sums come in where they are to pass: nothing else turns into one."""
    for index, config in enumerate(strategy.configs):
        if PLUS not in config.dims:
            continue
        operator, iteration = graph.operators[index], iterations[index]
        axes = [axis for axis, name in enumerate(config.dims) if name == PLUS]
        for position in iteration.linear:
            tensor = operator.inputs[position]
            producer = graph.tensors[tensor].producer
            is_cut = producer in samples.prologue and index not in samples.prologue
            is_cut &= samples.operator_dim[index] in iteration.inputs[position]
            summed = summed_over(graph, strategy.configs, index, tensor, axes)
            if is_cut or summed != axes or not where[index] <= where[producer]:
                names = map(strategy.meshes[config.mesh].axes.__getitem__, axes)
                raise InputError(
                    f"partial sums pass through an operator ({PLUS!r}) where they are made on the "
                    f"same mesh, but {graph.tensors[tensor].name} comes to {operator.name} as none "
                    f'over axis {", ".join(names)}; write "" there, so that it arrives summed'
                )
