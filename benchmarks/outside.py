"""What becomes of models from elsewhere: `python benchmarks/outside.py [--out FILE] [NAME ...]`.

Each is captured, planned for two devices, and trained for two steps in float64 beside plain PyTorch
in three ways (by samples, by tensors, at random splits), in a process of its own. One line each:
whole, or the share of modelled time in opaque modules, or refused and with which words.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import time
import traceback
from functools import partial
from pathlib import Path

from shardwright import api
from shardwright.errors import ShardwrightError
from shardwright.verbs import coverage

SECONDS = 300  # for one model
SEARCH = 1.0  # seconds of them to search for plans
CELLS = ("capture", "not split", "plan", "samples", "tensors", "random")


def names() -> list[str]:
    """Return all models, those written by hand first."""
    models, configs = (importlib.import_module(f"outside_{kind}") for kind in ("models", "configs"))
    return [*models.HAND, *configs.CONFIGS]


def __getattr__(name: str) -> object:
    """Let ``outside.py:NAME`` be a model's factory."""
    if (
        name.startswith("_")
        or name.endswith(("_batch", "_data"))
        or name in ("example_batch", "training_data")
    ):
        raise AttributeError(name)
    import outside_configs
    import outside_models

    if name in outside_configs.CONFIGS:
        return partial(outside_configs.build, name)
    return getattr(outside_models, name)


def study(name: str) -> dict[str, object]:
    """Capture, plan and train one model; say what became of it."""
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

    captured = attempt("capture", lambda: api.capture(spec))
    if captured is None:
        return row
    graph = captured.graph
    opaque = [op.kind for op in graph.operators if op.kind.startswith("opaque.")]
    found = api.coverage(graph)
    row["capture"] = "whole" if not opaque else ", ".join(sorted(set(opaque)))
    row["operators"], row["with a rule"] = found.num_operators, found.num_with_rule
    row["not split"] = round(found.replicated_share, 3)
    row["unruled"] = [f"{one.kind} {one.share:.0%}" for one in found.replicated]
    row["notes"] = list(graph.notes)
    frontier = attempt(
        "plan", lambda: api.plan(spec, "1x2xH100", batch_norm="synchronised", seconds=SEARCH)
    )
    if frontier is not None:
        row["plan"] = frontier.best.strategy.label  # type: ignore[attr-defined]
    ways = {
        "samples": coverage.data_parallel, "tensors": coverage.tensor_parallel,
        "random": coverage.random_splits,
    }  # fmt: skip
    for way, splits in ways.items():
        proof = attempt(way, lambda splits=splits: coverage.try_training(spec, splits))
        if proof is not None:
            verdict = "equal" if proof.is_equal else "DIFFERS"
            row[way] = f"{verdict} {proof.difference:.0e} {proof.precision} {proof.split_share:.0%}"
    return row


def study_apart(name: str) -> dict[str, object]:
    """Study one model in a process that may crash or run for ever."""
    context = multiprocessing.get_context("fork")  # imports are made once
    here, there = context.Pipe(duplex=False)

    def work() -> None:
        there.send(study(name))

    process = context.Process(target=work)
    process.start()
    try:
        if here.poll(SECONDS):
            return here.recv()
        return {"capture": f"TIMEOUT after {SECONDS} s"}
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
    options = parser.parse_args()
    for name in options.names or names():
        row = {"name": name, **study_apart(name)}
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
        cells = [str(row.get(key, ""))[:150] for key in CELLS]
        print(name, *cells, sep=" | ", flush=True)


if __name__ == "__main__":
    main()
