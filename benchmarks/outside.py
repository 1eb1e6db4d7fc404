"""What becomes of models from elsewhere: `python benchmarks/outside.py [--out FILE] [--searched] [NAME ...]`.

A name is that of a model, or of a file of them (`habits`). Each is captured, planned for two devices, and trained for three steps in float64 (float32 where its
kernels have no other) beside plain PyTorch in six ways (by samples, in two microbatches, with
parameters sharded, by tensors, at random splits, as two stages on four devices cut in the middle), in a process of its own. One line each: whole, or
the share of modelled time in opaque modules, or refused and with which words; at the end a table.

With ``--searched`` it is trained by plans instead: all of the frontiers of two short searches, on two and
on four devices so slow that dividing small work pays, under limits of memory and ways of training drawn
from its name, and some more that the searches looked at, each under another label.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import resource
import sys
import time
import traceback
from collections import Counter
from functools import partial
from pathlib import Path
from random import Random

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a script

from shardwright import api
from shardwright.core.costs import CostTable
from shardwright.core.graph import OperatorGraph
from shardwright.core.strategy import Precision, Strategy
from shardwright.errors import NoPlan, ShardwrightError
from shardwright.planner.judge.evaluate import evaluate
from shardwright.planner.lower import lower
from shardwright.planner.model.context import Context
from shardwright.planner.search import Limits, Training
from shardwright.planner.search.named import as_strategy
from shardwright.planner.search.search import survey
from shardwright.planner.search.survey import Survey
from shardwright.planner.space import Part, Seed, place_parts, seed_strategy
from shardwright.runtime import verify
from shardwright.runtime.capture import capture, load_model
from shardwright.runtime.capture.flexible import traceable_flex
from shardwright.runtime.train import build_seeded
from shardwright.verbs import coverage
from tests.planner.search.models import cluster

SECONDS = 300  # of a processor, for one model
WAIT = 10 * SECONDS  # for it, on a machine that others use
SEARCH = 2.0  # seconds of them to search for plans
BATCH, STEPS = 8, 3
HOSTS = (((1, 2), (2, 1)), ((1, 4), (2, 2), (4, 1)))  # of two and of four devices
BESIDE = 6  # plans to train that a search looked at, besides its frontier
SMALL = 0.25  # an opaque part of no more than this share of the modelled cost is small


def halves(graph: OperatorGraph) -> Strategy:
    """Return a pipeline of two stages on two devices each, cut in the middle whatever lies there."""
    count = len(graph.operators)
    middle, own = (count + 1) // 2, Seed(data=2, zero=1)
    first = Part(devices=(0, 1), operators=tuple(range(middle)), seed=own)
    second = Part(devices=(2, 3), operators=tuple(range(middle, count)), seed=own)
    return place_parts(graph, [first, second], Seed())


WAYS: dict[str, coverage.Splits] = {
    "samples": lambda graph: seed_strategy(graph, Seed(data=2)),
    "microbatches": lambda graph: seed_strategy(graph, Seed(data=2, num_microbatches=2)),
    "ZeRO-3": lambda graph: seed_strategy(graph, Seed(data=2, zero=3)),
    "tensors": lambda graph: seed_strategy(graph, Seed(tensor=2)),
    "random": lambda graph: coverage.random_strategy(graph, 1),
    "halves": halves,
}
CELLS = ("capture", "not split", "plan", *WAYS)


# -- plans to train instead ------------------------------------------------------------------------------


def searched(graph: OperatorGraph, precision: Precision, name: str) -> dict[str, coverage.Splits]:
    """Return all plans of two frontiers, and some more that were looked at, by labels of their own."""
    random, found = Random(name), dict[str, coverage.Splits]()
    for hosts in HOSTS:
        seen = _survey(graph, precision, random.choice(hosts), random)
        chosen = [plan.strategy for plan in seen.frontier.plans]
        others = {one.strategy.label: one.strategy for one in seen.findings.evaluations}
        for label in {one.label for one in chosen}:
            others.pop(label, None)
        chosen += random.sample(list(others.values()), min(BESIDE, len(others)))
        for strategy in chosen:
            label = f"{len(strategy.devices)}/{len(found)}: {strategy.label}"
            found[label] = lambda _, strategy=strategy: strategy
    return found


def _survey(
    graph: OperatorGraph, precision: Precision, hosts: tuple[int, int], random: Random
) -> Survey:
    """Search on devices and in memory that are drawn, or in whatever memory is needed."""
    where = cluster(
        *hosts,
        flops=10 ** random.uniform(7.5, 9.5),
        near=10 ** random.uniform(8, 11),
        far=10 ** random.uniform(8, 10),
    )
    training = Training(
        precision=precision,
        optimizer_states=1,
        clips=random.random() < 0.3,
        batch_norm="synchronised",
        recompute=random.choice(("auto", "auto", "blocks", "selective")),
    )
    context = Context.of(graph, where, CostTable(), training)
    usual = evaluate(context, as_strategy(context, Seed())).objective.peak_bytes
    end = time.process_time() + SEARCH
    for share in (random.choice((None, 0.9, 0.6, 0.4, 0.25)), 1.0, None):
        limits = Limits(memory_bytes=share and share * usual, max_candidates=3)
        try:
            return survey(
                graph,
                where,
                CostTable(),
                training=training,
                limits=limits,
                stop=lambda: time.process_time() > end,
            )
        except NoPlan:
            continue
    raise AssertionError("without a limit there is a plan")


FILES = (
    "models",
    "vision",
    "sequences",
    "science",
    "styles",
    "more",
    "idioms",
    "modern",
    "recipes",
    "published",
    "papers",
    "habits",
    "unseen",
    "current",
    "unusual",
    "fields",
    "customs",
    "corners",
    "pasted",
    "workshop",
    "latest",
    "seldom",
    "autumn",
    "winter",
    "chance",
)


def names() -> list[str]:
    """Return all models, those written by hand first. Each has a name of its own, or one would hide the other."""
    configs = importlib.import_module("outside_configs").CONFIGS
    found = [*(name for file in FILES for name in by_hand(file)), *configs]
    if twice := [name for name, count in Counter(found).items() if count > 1]:
        raise ValueError(
            f"every model must have a name of its own, but {', '.join(twice)} have not"
        )
    return found


def chosen(asked: list[str]) -> list[str]:
    """Return the models asked for, by their own names or by those of their files; all for none."""
    found = [by_hand(one) if one in FILES else [one] for one in asked]
    return [name for one in found for name in one] or names()


def by_hand(file: str) -> list[str]:
    """Return the factories of a file of models."""
    made = vars(importlib.import_module(f"outside_{file}")).items()
    returns = {name: getattr(value, "__annotations__", {}).get("return") for name, value in made}
    return [name for name, kind in returns.items() if kind == "Example" and name[0] != "_"]


def __getattr__(name: str) -> object:
    """Let ``outside.py:NAME`` be a model's factory."""
    if name.startswith("_"):
        raise AttributeError(name)
    import outside_configs

    if name in outside_configs.CONFIGS:
        return partial(outside_configs.build, name)
    for file in FILES:
        if name in by_hand(file):
            return getattr(importlib.import_module(f"outside_{file}"), name)
    raise AttributeError(name)  # such as NAME_batch, which is asked for, too


def study(name: str, by_plans: bool) -> dict[str, object]:
    """Capture, plan and train one model, by the plans of a search or in the usual ways; say what became of it."""
    spec = f"{Path(__file__).resolve()}:{name}"
    row: dict[str, object] = {}

    def attempt(what: str, work: object) -> object:
        begin = time.process_time()
        try:
            return work()  # type: ignore[operator]
        except ShardwrightError as error:
            row[what] = f"refused: {error}"
        except Exception as error:  # noqa: BLE001 - what the sweep looks for
            last = traceback.extract_tb(error.__traceback__)[-1]
            row[what] = (
                f"TRACEBACK {type(error).__name__}: {str(error)[:300]} ({Path(last.filename).name}:{last.lineno})"
            )
        finally:
            row[f"{what} s"] = round(time.process_time() - begin, 1)
        return None

    for precision in ("float64", "float32"):
        made = attempt("capture", lambda precision=precision: prepare(spec, precision))
        if made is None and "float" not in str(row["capture"]).lower():
            return row
        plain = made and attempt("plain", partial(train_plainly, made))
        if plain is not None:
            break
    else:
        return row
    captured = made[2]
    graph = captured.graph
    opaque = [op.kind for op in graph.operators if op.kind.startswith(("opaque.", "rowwise."))]
    found = coverage.coverage(graph)
    row["capture"] = "whole" if not opaque else ", ".join(sorted(set(opaque)))
    row["operators"], row["with a rule"] = found.num_operators, found.num_with_rule
    row["not split"] = round(found.replicated_share, 3)
    row["unruled"] = [f"{one.kind} {one.share:.0%}" for one in found.replicated]
    row["notes"] = list(graph.notes)
    ways = WAYS
    if by_plans:
        ways = attempt("plan", lambda: searched(graph, precision, name)) or {}  # type: ignore[assignment]
        row.setdefault("plan", f"{len(ways)} plans")
    elif frontier := attempt(
        "plan", lambda: api.plan(spec, "1x2xH100", batch_norm="synchronised", seconds=SEARCH)
    ):
        row["plan"] = frontier.best.strategy.label  # type: ignore[attr-defined]
    is_exact = precision == "float64" and verify.is_exact(captured)
    tolerance = verify.TOLERANCE if is_exact else verify.SINGLE_TOLERANCE
    if verify.draws_inside(made[0], captured, made[1][0]):
        row |= dict.fromkeys(ways, "not compared: it draws random numbers itself")
        return row
    for way, splits in ways.items():
        worst = attempt(way, lambda splits=splits: furthest(made, plain, splits))
        if worst is not None:
            said = "equal" if worst.difference <= tolerance else f"DIFFERS in {worst.name}"
            if said != "equal" and verify.random_operators(captured):
                said = "trained, not compared: it draws random numbers; apart"
            row[way] = f"{said} {worst.difference:.0e} {precision}"
    return row


def prepare(spec: str, precision: str) -> tuple[object, list[object], object]:
    """Return a model without dropout, its batches, and its capture."""
    source = load_model(spec)
    module = build_seeded(verify.exact_source(source))
    batches = verify.exact_batches(source, BATCH, None, STEPS)
    if precision == "float32":
        module.float()
        batches = [verify.in_single(batch) for batch in batches]
    verify.switch_off_dropout(module)
    captured = capture(module, batches[0], batch_norm="synchronised")
    return module, batches, verify.without_dropout(module, captured)[0]


def train_plainly(made: object, clips: bool = False) -> object:
    """Train a copy of what was prepared with plain PyTorch."""
    module, batches, _ = made
    with traceable_flex():  # of which torch has no gradient on CPUs
        return verify.train_plainly(module, batches, clips=clips, tell=_ignore)


def furthest(made: object, plain: object, splits: coverage.Splits) -> object:
    """Train on ranks of this process; return the tensor that is furthest from plain PyTorch's."""
    module, batches, captured = made
    program = lower(captured.graph, splits(captured.graph))
    if program.strategy.clips:
        plain = train_plainly(made, clips=True)
    return verify.gaps(
        verify.train_here(captured, program, module, batches, _ignore), plain, captured
    )[0]


def _ignore(_: int) -> None:
    """Nobody watches."""


def outcome(row: dict[str, object]) -> str:
    """Say in two words what became of a model."""
    said = [str(row.get("capture", "")), *(str(row[cell]) for cell in row if cell != "plain")]
    if "ModuleNotFoundError" in said[0]:
        return "package missing"
    if "TRACEBACK" in str(row.get("plain", "")) and "plan" not in row:
        return "not a model"
    if any(one.startswith(("TRACEBACK", "CRASH", "TIMEOUT", "refused: rank")) for one in said):
        return "broke off"
    if any("DIFFERS" in one for one in said):
        return "different"
    if said[0].startswith("refused") or ("plan" in row and str(row["plan"]).startswith("refused")):
        return "refused"
    if said[0] == "whole":
        return "whole"
    return "small opaque part" if row["not split"] <= SMALL else "opaque"


def _is_equal(cell: object) -> bool:
    return not isinstance(cell, str) or cell.startswith("equal")


def warm_up() -> None:
    """Load what every study would load again in its own process: export and the search's kernels."""
    torch.set_num_threads(1)  # threads do not outlive a fork
    batch = {"x": torch.zeros(2, 2)}
    api.plan(_Smallest(), "1x2xH100", batch=batch, seconds=SEARCH)
    searched(capture(_Smallest(), batch).graph, "float32", "")


class _Smallest(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).square().mean()


def study_apart(name: str, by_plans: bool) -> dict[str, object]:
    """Study one model in a process that may crash or run for ever."""
    context = multiprocessing.get_context("fork")  # what is loaded is so once
    here, there = context.Pipe(duplex=False)

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        there.send(study(name, by_plans))

    process = context.Process(target=work)
    process.start()
    try:
        if here.poll(WAIT):
            return here.recv()
        return {"capture": f"TIMEOUT after {WAIT} s"}
    except EOFError:
        process.join()
        return {"capture": f"CRASH with {process.exitcode}"}
    finally:
        process.kill()
        process.join()


def main() -> None:
    """Study every model asked for, each in a process, and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--out", type=Path, help="append a line of JSON per model")
    parser.add_argument("--searched", action="store_true", help="train the plans of two searches")
    options = parser.parse_args()
    outcomes: Counter[str] = Counter()
    warm_up()
    for name in chosen(options.names):
        row = {"name": name, **study_apart(name, options.searched)}
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
        shown = {cell: str(row.get(cell, "")) for cell in CELLS}
        if options.searched:
            odd = [cell for cell in row if cell[0].isdigit() and not _is_equal(row[cell])]
            shown = {cell: str(row.get(cell, "")) for cell in CELLS[:3]}
            shown |= {cell: f"{cell}: {row[cell]}" for cell in odd}
        print(name, *(cell[:300] for cell in shown.values()), sep=" | ", flush=True)
        outcomes[outcome(row)] += 1
    print("\n| models | outcome |", "|--:|---|", sep="\n")
    print(*(f"| {count} | {said} |" for said, count in outcomes.most_common()), sep="\n")


if __name__ == "__main__":
    main()
