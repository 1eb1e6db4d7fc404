"""What is planned for: the model as a graph, and the cluster.

Capturing and detecting need the runtime, and with it torch; it is imported when they are asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shardwright.core.cluster import Cluster
from shardwright.core.graph import KEPT_AS
from shardwright.errors import CaptureError, InputError
from shardwright.files import clusterfile
from shardwright.verbs.request import Watch

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
            _say_if_resized(error, source, example, seq)
            raise
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


def find_cluster(cluster: Cluster | str | None, watch: Watch | None = None) -> tuple[Cluster, bool]:
    """Return a cluster and whether it is this machine: a value, a file, ``8x8xH100``, or
    ``local``."""
    if isinstance(cluster, Cluster):
        return cluster, False
    if cluster and not is_here(cluster):
        return clusterfile.parse_cluster(cluster), False
    from shardwright.verbs.measure import local_cluster

    return local_cluster(watch or Watch()), True


def is_here(cluster: Cluster | str | None) -> bool:
    """Whether this machine is meant."""
    return cluster in (None, "", "local")
