"""What ``api.validate`` is made of: published runs to predictions, and how far they are apart.

Each model is captured once per batch and length, as three layers which are repeated; each run's one
strategy is evaluated. So hundreds of runs take minutes.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from shardwright.core.accuracy import Case, Validation
from shardwright.core.costs import CostTable
from shardwright.core.graph import DTYPE_BYTES, OperatorGraph
from shardwright.core.strategy import Strategy
from shardwright.errors import InputError, ShardwrightError
from shardwright.files.rungpus import cluster_of_run
from shardwright.files.runs import PublishedRun, read_runs
from shardwright.planner.judge.ties import half_width
from shardwright.planner.search import Context, as_strategy, evaluate_closely
from shardwright.planner.space import Seed, single_sync
from shardwright.report.accuracy import validation
from shardwright.verbs.completed import completed
from shardwright.verbs.dimensions import Inexpressible, decoder_of, is_no
from shardwright.verbs.expression import Expression, express
from shardwright.verbs.frameworks import (
    even_stages,
    with_alternate_products,
    with_copies_again,
)
from shardwright.verbs.reading import Reading, read, reading_of
from shardwright.verbs.request import Watch

# The share of the peak that a guess without any model would take (MFU).
USUAL_SHARE = 0.45
SCORED = ("A", "B", "")
MOST_MODELS = 4


def validate(path: str | Path, watch: Watch | None = None) -> Validation:
    """Plan every run of a file as it is printed. Raises InputError where the file is wrong."""
    watch, begin = watch or Watch(), time.monotonic()
    runs = [run for run in read_runs(path) if run.quality.upper()[:1] in SCORED]
    if not runs:
        raise InputError(f"{path}: all runs have quality C or D, which are not scored; give A or B")
    predictor, cases = _Predictor(), dict[int, Case]()
    for run in sorted(runs, key=_work_order):
        watch.tell(f"{run.source_id}: {run.model} on {run.gpus} {run.gpu}", len(cases) / len(runs))
        cases[run.row] = predictor.case(run)
        if watch.stop():
            break
    ordered = [cases[row] for row in sorted(cases)]
    return validation(ordered, Path(path).name, time.monotonic() - begin)


def _work_order(run: PublishedRun) -> tuple[object, ...]:
    """Order runs so that those of one model, length and batch follow each other."""
    return (run.model, run.layers, run.hidden, run.seq, run.global_batch or 0, run.row)


class _Predictor:
    """Predicts runs, keeping the last few graphs."""

    def __init__(self) -> None:
        self._graphs: dict[tuple[object, ...], OperatorGraph] = {}

    def case(self, run: PublishedRun) -> Case:
        """Return a run beside its prediction, or the reason why there is none."""
        whole = completed(run, [])
        case = published_case(whole)
        try:
            said = express(run)
            reading = reading_of(whole, said.decoder.loss)
            case = replace(case, assumed=said.assumed, software=said.software, reading=reading.kind)
            return self._predicted(case, said, reading)
        except Inexpressible as refused:
            return replace(case, reason=refused.reason, detail=refused.detail)

    def _predicted(self, case: Case, said: Expression, reading: Reading) -> Case:
        context = Context.of(self._graph(said), said.cluster, CostTable(), said.training)
        found = [self._evaluated(case, context, said, seed, reading) for seed in said.seeds]
        return min(found, key=lambda one: (not one.fits, one.predicted_seconds))

    def _evaluated(
        self, case: Case, context: Context, said: Expression, seed: Seed, reading: Reading
    ) -> Case:
        try:
            strategy = strategy_of(context, said, seed)
            prices, timeline, evaluated = evaluate_closely(
                context, strategy, runs_ahead=said.runs_ahead
            )
            memory = read(reading, context, strategy, evaluated.stage_bytes)
        except (ValueError, ShardwrightError) as error:
            raise Inexpressible("strategy is not legal here", str(error)) from error
        return replace(
            case,
            predicted_seconds=evaluated.seconds,
            predicted_bytes=memory.bytes,
            half_width=half_width(prices, timeline) * evaluated.seconds / timeline.step_seconds,
            fits=memory.fits,
        )

    def _graph(self, said: Expression) -> OperatorGraph:
        # Eight bits are a matter of products: tensors are kept in 16.
        kept = said.precision if said.precision in DTYPE_BYTES else "bfloat16"
        key = (said.decoder, said.global_batch, kept)
        if key not in self._graphs:
            from shardwright.runtime.capture.decoder import capture_decoder

            while len(self._graphs) >= MOST_MODELS:
                del self._graphs[next(iter(self._graphs))]
            try:
                self._graphs[key] = capture_decoder(*key)
            except ShardwrightError as error:  # of one row: the others are predicted all the same
                raise Inexpressible("no model of these dimensions runs", str(error)) from error
        return self._graphs[key]


def strategy_of(context: Context, said: Expression, seed: Seed) -> Strategy:
    """Return one of a run's strategies, its layers cut and its gradients sent as its software does."""
    strategy = as_strategy(context, seed)
    graph = context.graph
    stages = even_stages(graph, len(strategy.meshes)) if said.is_even else None
    if stages is not None:
        pairs = zip(strategy.configs, stages, strict=True)
        strategy = replace(strategy, configs=tuple(replace(one, mesh=to) for one, to in pairs))
    if said.recomputed_share < 1:
        strategy = replace(
            strategy, recompute=_first_of_stages(strategy, graph, said.recomputed_share)
        )
    if said.training.recompute == "selective":
        strategy = with_alternate_products(graph, strategy)
    if said.gathers_again and said.training.recompute != "blocks":
        strategy = with_copies_again(graph, strategy)
    if not said.overlaps_gradients:
        strategy = replace(strategy, gradient_sync=single_sync(graph))
    return strategy


def _first_of_stages(strategy: Strategy, graph: OperatorGraph, share: float) -> tuple[int, ...]:
    """Return the first of each stage's recomputed blocks, a share of them."""
    by_stage: dict[int, list[int]] = {}
    for block in strategy.recompute:
        stage = strategy.configs[graph.blocks[block].start].mesh
        by_stage.setdefault(stage, []).append(block)
    return tuple(one for found in by_stage.values() for one in found[: round(share * len(found))])


def published_case(run: PublishedRun) -> Case:
    """Return what a completed run's source says."""
    hardware, is_lost = f"{run.gpus} {run.gpu}", not is_no(run.oom)
    group = (run.source_id, run.model, hardware, str(run.seq), run.precision, run.compile)
    return Case(
        id=run.id,
        row=run.row,
        source=run.source_id,
        model=run.model,
        hardware=hardware,
        layout=_layout(run),
        group=" | ".join(group),
        work=float(run.seq * (run.global_batch or 1)),
        published_seconds=None if is_lost else published_seconds(run),
        published_bytes=None if run.peak_mem_gib is None else run.peak_mem_gib * 2**30,
        is_out_of_memory=is_lost,
        baseline_seconds=_baseline(run),
    )


def _layout(run: PublishedRun) -> str:
    names = ("tp", "pp", "vpp", "cp", "ep", "dp", "micro_batch", "grad_accum")
    degrees = [
        f"{name} {value}" for name in names if (value := getattr(run, name)) not in (None, 1)
    ]
    said = (run.sharding, f"recompute {run.recompute}" if run.recompute else "")
    return ", ".join([*degrees, *(text for text in said if text)])


def published_seconds(run: PublishedRun) -> float | None:
    """Return the seconds per step that a source prints, or that its throughput means."""
    batch = run.global_batch
    if run.iter_s is not None or batch is None:
        return run.iter_s
    if run.tokens_per_s_per_gpu is not None:
        return batch * run.seq / (run.tokens_per_s_per_gpu * run.gpus)
    return batch / run.samples_per_s if run.samples_per_s is not None else None


def _baseline(run: PublishedRun) -> float | None:
    """Return the seconds of a guess without any model: 6 N + 12 L h s flops a token at a usual MFU."""
    try:
        cluster = cluster_of_run(replace(run, gpus=1))[0]
    except InputError:
        return None
    rates = dict(cluster.kinds[0].peak_flops)
    usual = ["float8"] * ("fp8" in run.precision.lower()) + ["bfloat16", "float16"]
    peak = next(filter(None, map(rates.get, usual)), max(rates.values()))
    params = (run.active_params_b or (run.params_b or 0.0) * (not run.experts)) * 1e9
    attention = 12 * run.layers * run.hidden * run.seq
    if not params:
        try:
            params = decoder_of(run, []).num_active
        except Inexpressible:
            return None
    if run.global_batch is None:
        return None
    flops = (6 * params + attention) * run.seq * run.global_batch
    return flops / (peak * USUAL_SHARE * run.gpus)
