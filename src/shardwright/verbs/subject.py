"""What is planned for: the model as a graph, how it is trained, and the cluster.

Capturing and detecting need the runtime, and with it torch; it is imported when they are asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.core.cluster import Cluster
from shardwright.core.graph import KEPT_AS
from shardwright.core.strategy import GradientSync, Strategy
from shardwright.errors import CaptureError, InputError, PrecisionError
from shardwright.files import clusterfile
from shardwright.planner.search import Training
from shardwright.verbs.compression import feedback_of, least_sent
from shardwright.verbs.request import OPTIMIZER_STATES, Request, Watch

if TYPE_CHECKING:
    from torch import nn

    from shardwright.runtime.capture import Captured
    from shardwright.runtime.capture.models import ModelSource

Batch = Mapping[str, Any] | tuple[Any, ...]


def capture(
    model: str | nn.Module,
    batch: Batch | None = None,
    *,
    global_batch: int | None = None,
    seq: int | None = None,
    precision: str = "auto",
    batch_norm: str = "local",
    outputs: tuple[str, ...] = (),
) -> Captured:
    """Capture a model, by name or as a module with an example batch, at the global batch size.

    ``precision`` auto keeps the model's own dtypes. Without ``global_batch`` the example's own size
    counts, of a model by name the default of the function that makes its batch.
    """
    from shardwright.runtime.capture import capture as capture_module
    from shardwright.runtime.capture import load_model

    over: Any = batch_norm  # one of two words, checked by Request
    own = None if precision == "auto" else KEPT_AS.get(precision, precision)
    if isinstance(model, str):
        source = load_model(model)
        size = global_batch or source.own_batch_size()
        example = source.sample(size, seq)
        name = source.name if model.startswith("hf:") else ""
        try:
            return capture_module(
                source.build(),
                example,
                global_batch=size,
                precision=own,
                batch_norm=over,
                name=name,
                outputs=outputs,
            )
        except CaptureError as error:
            if not isinstance(error, PrecisionError):  # which is no matter of rows
                _say_if_resized(error, source, example, seq)
            if error.place or not source.place:
                raise
            raise type(error)(str(error), place=source.place) from error
    if batch is None:
        raise InputError("a module is captured with an example batch; give batch=")
    return capture_module(
        model,
        batch,
        global_batch=global_batch,
        precision=own,
        batch_norm=over,
        outputs=outputs,
    )


def captured_for(model: str | nn.Module, request: Request, batch: Batch | None = None) -> Captured:
    """Capture a model as a request wants it planned."""
    return capture(
        model,
        batch,
        global_batch=request.global_batch,
        seq=request.seq,
        precision=request.precision,
        batch_norm=request.batch_norm,
        outputs=request.outputs,
    )


def _say_if_resized(
    error: CaptureError, source: ModelSource, example: Mapping[str, Any], seq: int | None
) -> None:
    """Raise what is likelier the cause than the model, where rows were repeated or dropped."""
    from shardwright.runtime.capture.models import rows_of

    asked = rows_of(example)
    have = source.made_otherwise(asked, seq)
    if have:
        raise CaptureError(
            f"the example batch has {have} rows, and was brought to {asked} by repeating or dropping "
            f"some, but then {error}; where rows refer to each other, let the function that makes the "
            f"batch take batch_size, or plan for {have} (-b {have})"
        ) from error


def own_batch_size(model: str) -> int:
    """Return the samples of a step of a model by name where nobody says how many."""
    from shardwright.runtime.capture import load_model

    return load_model(model).own_batch_size()


def training_for(request: Request) -> Training:
    """Return how a model is to be trained: what a request and ``Training`` both name, and what follows."""
    return _training(
        request,
        optimizer_states=OPTIMIZER_STATES[request.optimizer],
        clips=request.clip > 0,
        max_norm=request.clip,
        least_sent=least_sent(request),
        density=1.0 if request.allow_compression else request.density,
        feedback=feedback_of(request),
    )


def training_of(strategy: Strategy) -> Training:
    """Return how a plan's model is trained; it says of blocks, not in a word, what is recomputed."""
    sync = strategy.gradient_sync
    again = Training().recompute
    return _training(strategy, sync, gradient_dtype=sync.dtype, recompute=again)


def _training(*sources: Request | Strategy | GradientSync, **more: Any) -> Training:
    named = {one.name for one in fields(Training)}
    shared = [(source, one.name) for source in sources for one in fields(source)]
    return Training(
        **{name: getattr(source, name) for source, name in shared if name in named} | more
    )


def find_cluster(
    cluster: Cluster | str | Path | None, watch: Watch | None = None
) -> tuple[Cluster, bool]:
    """Return a cluster and whether it is this machine: a value, a file, ``8x8xH100``, or
    ``local``."""
    if isinstance(cluster, Cluster):
        return cluster, False
    if not is_here(cluster):
        return clusterfile.parse_cluster(str(cluster)), False
    from shardwright.verbs.measure import local_cluster

    return local_cluster(watch or Watch()), True


def is_here(cluster: Cluster | str | Path | None) -> bool:
    """Whether this machine is meant."""
    return cluster in (None, "", "local")
