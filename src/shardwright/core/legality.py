"""What a strategy must keep to mean anything: alone, and beside the names and sizes of its graph.

Every complaint has the rule, the values and the remedy, and is an InputError. What follows from the
rules of operators is checked by ``planner.space.legal``, which begins with these.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from shardwright.core.compression import MERGED, SPARSE
from shardwright.core.graph import OperatorGraph
from shardwright.core.layout import (
    FLAT,
    PARTIAL,
    REPLICATE,
    Layout,
    local_shape,
    shard_dim,
)
from shardwright.core.staleness import ACCUMULATES
from shardwright.core.strategy import MIXED, Feedback, GradientSync, Mesh, Strategy
from shardwright.errors import InputError

# Limits, so that no file can make a Program that fills the memory.
MOST_DEVICES = 131_072
MOST_MESHES = 4096
MOST_AXES = 16
# A Program has instructions for every microbatch: as many as fit memory, and nobody wants more.
MOST_MICROBATCHES = 4096
# Meshes times microbatches: the order of them all is made before the Program.
MOST_FORWARDS = 2**18
MOST_STATES = 64
MOST_NAMED = 12  # of a list, in a message


def check_alone(strategy: Strategy) -> None:
    """Check what a strategy must keep whatever its graph."""
    _check_places(strategy)
    _check_pipeline(strategy)
    _check_optimizer(strategy)
    _check_updates(strategy)
    if not strategy.pipeline.is_flushed:
        _check_flushless(strategy)
    _check_homes(strategy)
    sync = strategy.gradient_sync
    if sync.error_feedback and (sync.dtype == "parameter" or strategy.precision == "float16"):
        raise InputError(
            "error feedback keeps what gradients lose on the wire, so they need a dtype there, and a "
            f"loss whose scale stays as it is, but they travel in {sync.dtype} and the precision is "
            f"{strategy.precision}; name a dtype, and plan float16 without error feedback"
        )
    _check_compression(strategy)


def _check_places(strategy: Strategy) -> None:
    """Check meshes, and that operators and parameters lie on them."""
    if not 1 <= len(strategy.meshes) <= MOST_MESHES or not all(m.devices for m in strategy.meshes):
        raise InputError(
            f"a strategy has 1 to {MOST_MESHES:,} meshes of at least one device each, but this one "
            f"has {[len(mesh.devices) for mesh in strategy.meshes[:MOST_NAMED]]}; name devices"
        )
    for number, mesh in enumerate(strategy.meshes):
        _check_mesh(number, mesh)
    _check_operators(strategy)
    lengths = {len(mesh.axes) for mesh in strategy.meshes}
    for parameter in dict.fromkeys(strategy.parameters):
        if not {len(parameter.rest), len(parameter.optimizer)} <= lengths:
            raise InputError(
                "a layout has one placement per mesh axis, but a parameter lies as "
                f"{parameter.rest} and {parameter.optimizer} on meshes of {sorted(lengths)} axes; "
                f"write {REPLICATE} for axes that hold copies"
            )


def _check_operators(strategy: Strategy) -> None:
    for config in dict.fromkeys(strategy.configs):
        if not 0 <= config.mesh < len(strategy.meshes):
            raise InputError(
                f"an operator runs on one of the meshes 0 to {len(strategy.meshes) - 1}, but one is "
                f"to run where there is no mesh, on {config.mesh}; name a mesh of the list"
            )
        axes = strategy.meshes[config.mesh].axes
        if len(config.dims) != len(axes):
            raise InputError(
                f"an operator names one dim per axis of its mesh, but on {axes} {config.dims} does "
                'not; write "" for axes that do not split it'
            )


def _check_pipeline(strategy: Strategy) -> None:
    pieces = strategy.pipeline.num_microbatches
    if pieces > MOST_MICROBATCHES:
        raise InputError(
            f"a step has at most {MOST_MICROBATCHES:,} microbatches, but num_microbatches is "
            f"{pieces:,}; make microbatches of more samples"
        )
    if pieces * len(strategy.meshes) > MOST_FORWARDS:
        raise InputError(
            f"a step has at most {MOST_FORWARDS:,} forwards, meshes times microbatches, but there are "
            f"{len(strategy.meshes):,} and {pieces:,}; make microbatches of more samples"
        )
    if (strategy.pipeline.schedule == "custom") != bool(strategy.pipeline.order):
        raise InputError(
            "a custom schedule, and no other, has an order, but schedule is "
            f"{strategy.pipeline.schedule} and order has {len(strategy.pipeline.order)} lines; "
            "set the schedule to custom and write the order, or leave it out"
        )


def _check_optimizer(strategy: Strategy) -> None:
    if not 0 <= strategy.optimizer_states <= MOST_STATES:
        raise InputError(
            f"an optimizer keeps 0 to {MOST_STATES} tensors per parameter, but optimizer_states is "
            f"{strategy.optimizer_states}; AdamW keeps 2"
        )
    if not 0 <= strategy.max_norm < math.inf or (strategy.max_norm and not strategy.clips):
        raise InputError(
            "the largest gradient norm is a finite number of at least 0, and 0 where clips is false, "
            f"but max_norm is {strategy.max_norm}; plan again with --clip, or set clips to true"
        )


def _check_updates(strategy: Strategy) -> None:
    if strategy.updates == "microbatch" and not _may_update_often(strategy):
        raise InputError(
            "parameters can be updated after every microbatch where the next one's forward comes behind, "
            "and where they are updated where they rest: on one mesh, with schedule 1f1b, in one dtype, and "
            f"in one layout, but meshes, schedule and precision are {len(strategy.meshes)}, "
            f"{strategy.pipeline.schedule} and {strategy.precision}; update by step, or change these, "
            "or ZeRO-1 and 2 into 0 or 3"
        )
    if strategy.updates != "step" and (strategy.clips or strategy.precision == "float16"):
        raise InputError(
            "parameters can be updated when their gradients are ready where none waits for all others', "
            f"but clips is {strategy.clips} and the precision is {strategy.precision}; update by step, "
            "or neither clip nor plan for float16"
        )


def _check_compression(strategy: Strategy) -> None:
    sync = strategy.gradient_sync
    apart = [one for one, _, _ in sync.apart]
    if len(set(apart)) < len(apart):
        raise InputError(
            "each parameter is compressed in one way, but apart names the parameters "
            f"{apart[:MOST_NAMED]}; name each once"
        )
    for compressor, density in ((sync.compressor, sync.density), *[one[1:] for one in sync.apart]):
        _check_density(compressor, density)
    check_feedback(sync)
    _check_warm_up(strategy)
    if not sync.compressors:
        return
    if sync.dtype != "parameter" or sync.error_feedback or strategy.precision == "float16":
        raise InputError(
            "a compressor says what travels, feeds back what that loses, and needs a loss whose scale "
            f"stays as it is, but gradients travel in {sync.dtype}, error_feedback is "
            f"{sync.error_feedback} and the precision is {strategy.precision}; leave out the dtype and "
            "the feedback, and plan float16 without a compressor"
        )
    if strategy.updates == "microbatch":
        raise InputError(
            "compressed gradients are those of a step, but parameters are updated after every "
            "microbatch; update by step, or leave out the compressor"
        )


def _check_warm_up(strategy: Strategy) -> None:
    if strategy.gradient_sync.feedback.warm_up and not strategy.pipeline.is_flushed:
        raise InputError(
            "a warm-up changes what travels between two steps, with nothing under way, but this plan's pipeline "
            "is never flushed; leave the warm-up out, or plan without staleness"
        )


def _check_density(compressor: str, density: float) -> None:
    if not 0 < density <= 1 or (density < 1 and compressor not in SPARSE):
        raise InputError(
            "the density of top-k or gtop-k is the share of elements that it keeps, above 0 and at most 1, "
            f"and 1 where nothing is selected, but it is {density} and the compressor is {compressor}; give "
            "one such as 0.01 with top-k, or none"
        )


def check_feedback(sync: GradientSync) -> None:
    """Check what goes with compressors."""
    found = set[str](sync.compressors)
    named = ", ".join(sorted(found)) or "none"
    _refuse(
        _feedback_rules(sync.feedback, found),
        "{}, but it is {} and the compressors are " + named + "; {}",
    )


def _feedback_rules(said: Feedback, found: set[str]) -> tuple[Rule, ...]:
    return (
        (said != Feedback() and not found,
         "feedback goes with a compressor", said.words, "give a compressor, or leave feedback out"),
        (said.rank < 1 or (said.rank > 1 and "powersgd" not in found),
         "a rank of 1 or more is that of powersgd's factors", said.rank, "give powersgd, or rank 1"),
        (said.residual == "paper" and not found <= MERGED,
         "the published rule of residuals is gtop-k's", said.residual, "choose conserving or none"),
        (not 0 <= said.momentum < 1,
         "momentum is 0 or more, and below 1", said.momentum, "give one such as 0.9"),
        (said.momentum and (not found <= SPARSE or said.residual == "none"),
         "momentum runs before the selection of elements of what is kept: with top-k or gtop-k, and residuals",
         said.momentum, "leave it to the optimizer"),
        (not (said.masked or said.momentum),
         "what is not masked is a momentum before the selection", said.momentum, "give one such as 0.9"),
        (not 0 <= said.local_norm < math.inf,
         "the largest norm that devices put in is finite, and at least 0", said.local_norm, "give one, or 0"),
        (said.warm_up < 0 or (said.warm_up and not found & SPARSE),
         "densities of the first steps are top-k's and gtop-k's, each of some steps", said.warm_up,
         "leave the warm-up out"),
    )  # fmt: skip


def _check_flushless(strategy: Strategy) -> None:
    """Check what a pipeline that is never flushed cannot do."""
    name, pipeline = strategy.pipeline.staleness, strategy.pipeline
    _refuse((
        (len(strategy.devices) < sum(len(mesh.devices) for mesh in strategy.meshes),
         "has devices of its own for every stage",
         f"stages of {[len(m.devices) for m in strategy.meshes[:MOST_NAMED]]} on {len(strategy.devices)}",
         "cut the model into fewer stages"),
        (any(one.rest != one.optimizer for one in strategy.parameters),
         "holds parameters and their optimizer state whole on every data-parallel device of a stage",
         "some that are sharded further", "leave out ZeRO"),
        (pipeline.schedule != "1f1b", "runs one forward and one backward of a stage in turn",
         f"{pipeline.schedule} order", "set the schedule to 1f1b"),
        (pipeline.num_microbatches > 1 and name not in ACCUMULATES,
         "runs its minibatches whole", f"{pipeline.num_microbatches} microbatches", "set num_microbatches to 1"),
        (1 < len(strategy.meshes) > pipeline.num_microbatches and name in ACCUMULATES,
         "updates once for at least as many microbatches as it has stages",
         f"{pipeline.num_microbatches} microbatches for {len(strategy.meshes)} stages",
         f"set num_microbatches to {len(strategy.meshes)} or more"),
        (strategy.precision in MIXED and strategy.precision != "bfloat16",
         "trains in float64, float32 or bfloat16: no stage waits for what all say of a scaled loss",
         strategy.precision, "choose another precision"),
        (strategy.updates != "step" or strategy.gradient_sync.feeds_back,
         "updates a stage behind each of its backwards, by whole gradients",
         f"updates by {strategy.updates}, compressors {strategy.gradient_sync.compressors}, error feedback "
         f"{strategy.gradient_sync.error_feedback}", "leave these out"),
    ), f"an asynchronous pipeline ({name}) " + '{}, but the strategy has {}; {}, or set staleness to "none"')  # fmt: skip


Rule = tuple[object, str, object, str]  # whether it is broken, the rule, the value, the remedy


def _refuse(rules: Iterable[Rule], form: str) -> None:
    """Refuse what breaks a rule, in words of a form."""
    for is_wrong, *words in rules:
        if is_wrong:
            raise InputError(form.format(*words))


def _may_update_often(strategy: Strategy) -> bool:
    return (
        len(strategy.meshes) == 1
        and strategy.pipeline.schedule == "1f1b"
        and strategy.precision not in MIXED
        and all(one.rest == one.optimizer for one in strategy.parameters)
    )


def _check_homes(strategy: Strategy) -> None:
    """Check what parameters with a mesh of their own, servers, ask of all else."""
    homes = sorted({one.mesh for one in strategy.parameters if one.mesh != -1})
    if not homes:
        return
    if not 0 <= homes[0] <= homes[-1] < len(strategy.meshes):
        raise InputError(
            f"a parameter lies on one of the meshes 0 to {len(strategy.meshes) - 1}, or, with mesh -1, on "
            f"that of its first use, but one is to lie on {homes[0] if homes[0] < 0 else homes[-1]}; name "
            "a mesh of the list"
        )
    sync, schedule = strategy.gradient_sync, strategy.pipeline.schedule
    _refuse((
        (not strategy.pipeline.is_flushed, "are updated once a step, between two steps",
         f"staleness is {strategy.pipeline.staleness}", 'set it to "none"'),
        (schedule not in ("1f1b", "gpipe"), "are pushed to in 1f1b or gpipe order",
         f"the schedule is {schedule}", "choose one of these"),
        (sync.compressors, "are sent whole gradients, in the wire's dtype", f"they are compressed ({sync.wire})",
         "leave out the compressor"),
        (strategy.updates != "step", "are updated when all gradients of a step have arrived",
         f"updates is {strategy.updates}", "update by step"),
        (any(one.mesh >= 0 and one.keeps for one in strategy.parameters),
         "give parameters away once a step, and these are kept until backward", "keeps is true",
         "set it to false"),
    ), "parameter servers (parameters with a mesh of their own) {}, but {}; {}, or let parameters lie on the mesh of "
       "their first use (mesh -1)")  # fmt: skip


def _check_mesh(number: int, mesh: Mesh) -> None:
    if len(mesh.axes) > MOST_AXES or any(size < 1 for size in mesh.sizes):
        raise InputError(
            f"a mesh has at most {MOST_AXES} axes of size 1 or more, but mesh {number} has sizes "
            f"{mesh.sizes[:MOST_NAMED]}; the sizes multiply to its number of devices"
        )
    if not 0 <= min(mesh.devices) <= max(mesh.devices) < MOST_DEVICES:
        raise InputError(
            f"devices are numbered from 0 to {MOST_DEVICES - 1:,}, but mesh {number} has "
            f"{min(mesh.devices)} to {max(mesh.devices)}; use numbers of the cluster's devices"
        )


def check_against(strategy: Strategy, graph: OperatorGraph) -> None:
    """Check that a strategy, legal by itself, names what its graph has."""
    for name, found, count in (
        ("operator", len(strategy.configs), len(graph.operators)),
        ("parameter", len(strategy.parameters), len(graph.parameters)),
    ):
        if found != count:
            raise InputError(
                f"a strategy has one config per {name}, but there are {found} for {count} of them; "
                "plan this model again"
            )
    _check_layouts(strategy, graph)
    _check_gradients(strategy.gradient_sync, set(graph.parameters))
    for name, chosen, count, what in (
        ("recompute", strategy.recompute, len(graph.blocks), "blocks"),
        ("recompute_operators", strategy.recompute_operators, len(graph.operators), "operators"),
        ("segment_starts", strategy.segment_starts, len(graph.operators), "operators"),
        ("reshard_again", strategy.reshard_again, len(graph.tensors), "tensors"),
    ):
        outside = [index for index in chosen if not 0 <= index < count]
        if outside:
            raise InputError(
                f"{name} names {what} outside 0..{count - 1}: {outside[:MOST_NAMED]}; take them out"
            )


def _check_gradients(sync: GradientSync, known: set[int]) -> None:
    """Check that what is said of gradients names parameters."""
    buckets = [index for bucket in sync.buckets for index in bucket]
    apart = [index for index, _, _ in sync.apart if index not in known]
    if apart:
        raise InputError(
            f"what is compressed apart are parameters, but {apart[:MOST_NAMED]} are none; take them out"
        )
    times = Counter(buckets)
    wrong = sorted([one for one in times if one not in known or times[one] > 1])
    if wrong:
        raise InputError(
            "the gradient buckets must name parameters, each once, but "
            f"{wrong[:MOST_NAMED]} are not parameters or named twice; take them out"
        )


def _check_layouts(strategy: Strategy, graph: OperatorGraph) -> None:
    """Check that every parameter can lie as it is to lie, on the mesh of its first use."""
    known: set[object] = set()
    for tensor, config in zip(graph.parameters, strategy.parameters, strict=True):
        spec, readers = graph.tensors[tensor], graph.consumers[tensor]
        home, first = strategy.home(config, readers), strategy.first_use(readers)
        if home > first:
            raise InputError(
                f"a parameter lies on a mesh before those that use it, so that it is sent before forward, but "
                f"{spec.name} lies on mesh {home} and is used on mesh {first}; list the servers' mesh first"
            )
        key = (spec.shape, home, config.rest, config.optimizer)
        if key in known:
            continue
        known.add(key)
        for layout in dict.fromkeys((config.rest, config.optimizer)):
            _check_layout(spec.name, spec.shape, layout)
            if home >= 0:
                _check_shards(spec.name, spec.shape, layout, strategy.meshes[home])


def _check_layout(name: str, shape: tuple[int, ...], layout: Layout) -> None:
    for placement in layout:
        if placement in (REPLICATE, FLAT) or 0 <= shard_dim(placement) < len(shape):
            continue
        what = "a term of a sum" if placement == PARTIAL else f"split along {shard_dim(placement)}"
        raise InputError(
            f"a parameter lies whole ({REPLICATE}), flat ({FLAT}) or split along one of its dims, "
            f"but {name} of shape {shape} cannot lie as {layout}: {what}; choose a dim from 0 to "
            f"{len(shape) - 1}"
        )


def _check_shards(name: str, shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> None:
    if len(layout) != len(mesh.axes):
        raise InputError(
            f"a layout has one placement per axis of its mesh, but {name} lies as {layout} on the "
            f"axes {mesh.axes}; write {REPLICATE} for axes that hold copies"
        )
    try:
        local_shape(shape, layout, mesh.sizes)
    except ValueError as error:
        raise InputError(
            f"all shards of a parameter are equal, but {name} lies as {layout} on axes of sizes "
            f"{mesh.sizes}, and {error}; split another dim, or lay it flat ({FLAT})"
        ) from None


def divisors(size: int, most: int = MOST_MICROBATCHES) -> tuple[int, ...]:
    """Return what divides a size, ascending, up to ``most``."""
    found = [one for one in range(1, min(math.isqrt(size), most) + 1) if size % one == 0]
    found += [size // one for one in reversed(found) if one * one != size]
    return tuple([one for one in found if one <= most])


def numbers(values: Iterable[int]) -> str:
    """Write some numbers as people list them, the middle left out where they are many."""
    texts = [f"{value:,}" for value in values]
    if len(texts) > MOST_NAMED:
        texts = [*texts[: MOST_NAMED - 1], "...", texts[-1]]
    return ", ".join(texts)
