"""Predicted beside published: one case per run, and what many cases add up to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One published run and what is predicted for it; None is what was not published.

    ``reason`` says why it cannot be expressed ("": it can; then seconds and bytes are predicted).
    ``group`` names source, model, hardware and work, so that cases of one group differ in layout only.
    ``work`` is tokens per step. ``half_width`` is the prediction's, in seconds. ``reading`` says which
    bytes are meant: those that tensors take (``allocated``), that the allocator has for them
    (``reserved``), or that the driver sees (``device``). ``fits``: whether the run is predicted to.
    ``is_out_of_memory``: the source says that it did not fit. ``assumed`` lists
    what was not published and taken as usual.
    """

    id: str
    row: int
    source: str
    model: str
    hardware: str
    layout: str
    group: str
    work: float
    published_seconds: float | None
    published_bytes: float | None
    is_out_of_memory: bool = False
    reason: str = ""
    detail: str = ""
    assumed: tuple[str, ...] = ()
    software: str = ""
    predicted_seconds: float | None = None
    predicted_bytes: float | None = None
    half_width: float = 0.0
    baseline_seconds: float | None = None
    reading: str = "allocated"
    fits: bool = False

    @property
    def is_timed(self) -> bool:
        """Whether both a predicted and a published step time are known."""
        return self.published_seconds is not None and self.predicted_seconds is not None

    @property
    def error(self) -> float | None:
        """Predicted over published step time, less one."""
        if self.published_seconds is None or self.predicted_seconds is None:
            return None
        return self.predicted_seconds / self.published_seconds - 1

    @property
    def baseline_error(self) -> float | None:
        """The same of the baseline."""
        if self.published_seconds is None or self.baseline_seconds is None:
            return None
        return self.baseline_seconds / self.published_seconds - 1

    @property
    def memory_error(self) -> float | None:
        """Predicted over published peak memory, less one."""
        if self.published_bytes is None or self.predicted_bytes is None:
            return None
        return self.predicted_bytes / self.published_bytes - 1

    @property
    def is_covered(self) -> bool:
        """Whether the published time lies within the half-width of the predicted one."""
        if self.published_seconds is None or self.predicted_seconds is None:
            return False
        return abs(self.predicted_seconds - self.published_seconds) <= self.half_width


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """What errors add up to: medians of absolute errors, their 90th percentile, signed medians."""

    count: int
    median: float
    bias: float
    p90: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """How well layouts of one group are ordered.

    ``tau`` is Kendall's, its mean over groups weighted by pairs; ``tau_apart`` over pairs whose published times differ by more than 5 %.
    ``regret``: by how much the layout predicted fastest is slower than the fastest published.
    """

    groups: int
    pairs: int
    tau: float
    pairs_apart: int
    tau_apart: float
    mean_regret: float
    worst_regret: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A source's cases, or all."""

    name: str
    cases: int
    expressed: int
    time: Accuracy
    baseline: Accuracy
    memory: Accuracy
    order: Order
    baseline_order: Order
    coverage: float
    foretold: int
    out_of_memory: int
    refused: int
    fitted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """All cases of a file, by source and overall.

    ``source_median`` is the mean over sources of their median errors, with the baseline's beside.
    ``reasons`` counts the cases that cannot be expressed.
    """

    file: str
    cases: tuple[Case, ...]
    sources: tuple[Summary, ...]
    overall: Summary
    source_median: float
    source_median_baseline: float
    reasons: tuple[tuple[str, int], ...]
    seconds: float = 0.0
