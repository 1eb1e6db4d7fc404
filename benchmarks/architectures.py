"""How much of Hugging Face's architectures can be planned: `python benchmarks/architectures.py --write`.

Captures every architecture that has an `hf:` name in a usual size (no weights), counts operators and
rules, models which share of a step's cost cannot be split, and trains a miniature of each in three
ways on two ranks, beside plain PyTorch. Prints the table; with `--write` it becomes
`docs/reference/coverage.md`, line by line. Names given as arguments restrict it to those
architectures.
"""

from __future__ import annotations

import argparse
import gc
import platform
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from processor import processor_name

from shardwright import __version__
from shardwright.errors import ShardwrightError
from shardwright.runtime.capture import capture, load_model
from shardwright.runtime.capture.tasks import FAMILIES, TASKS
from shardwright.verbs.coverage import (
    Proof,
    Splits,
    cost_share,
    coverage,
    data_parallel,
    random_splits,
    tensor_parallel,
    try_training,
)

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "coverage.md"
BEGIN, END = "<!-- generated: begin -->\n", "<!-- generated: end -->\n"
GLOBAL_BATCH = 8
TINY = "-tiny"
# Recurrences are written out step by step in the graph, so these are captured at few steps.
SHORT, TINY_SHORT = {"mamba": 16, "rwkv": 16}, {"mamba": 16, "mamba2": 16, "rwkv": 16}
WAYS: tuple[Splits, ...] = (data_parallel, tensor_parallel, random_splits)
HEAD = (
    "| model | parameters | captured | operators | with a rule | not splittable "
    "| not by samples | capture | data parallel | tensor parallel | random splits |\n"
    "|---|--:|---|--:|--:|--:|--:|--:|---|---|---|\n"
)
TASK_WORDS = {
    "tokens": "tokens, next or masked", "pairs": "source and target tokens",
    "images": "images and classes", "maps": "images and a class per pixel",
    "sounds": "sound and classes", "spectrograms": "spectrograms and tokens",
    "captions": "images and their captions",
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    kind: str
    name: str
    tiny: str
    parameters: int
    captured: str
    num_operators: int
    num_with_rule: int
    share: float
    mixed: float
    seconds: float
    proofs: tuple[str, ...]


def representatives(family: str) -> list[tuple[str, str, str]]:
    """Return (architecture, a usual size, the miniature) of a family's architectures, in order."""
    sizes: dict[str, list[str]] = {}
    for name, fields in FAMILIES[family].items():
        sizes.setdefault(fields["model_type"], []).append(name)
    return [
        (
            kind,
            next(name for name in names if not name.endswith(TINY)),
            next(name for name in names if name.endswith(TINY)),
        )
        for kind, names in sizes.items()
    ]


def study(kind: str, name: str, tiny: str) -> Row:
    """Capture one architecture and try its miniature."""
    source = load_model(f"hf:{name}")
    module, example = source.build(), source.example(2, SHORT.get(kind))
    begin = time.perf_counter()
    graph = capture(module, example, global_batch=GLOBAL_BATCH, name=name).graph
    seconds = time.perf_counter() - begin
    found = coverage(graph)
    opaque = [op.kind for op in graph.operators if op.kind.startswith("opaque.")]
    captured = f"{len(opaque)} opaque ({', '.join(sorted(set(opaque)))})"
    configs = data_parallel(graph).configs
    mixed = cost_share(graph, lambda index: not any(configs[index].dims))
    proofs = tuple(proof_text(tiny, way, TINY_SHORT.get(kind)) for way in WAYS)
    return Row(
        kind, name, tiny, graph.num_parameters, captured if opaque else "whole",
        found.num_operators, found.num_with_rule, found.replicated_share, mixed,
        seconds, proofs,
    )  # fmt: skip


def proof_text(tiny: str, way: Splits, seq: int | None) -> str:
    """Train a miniature one way, and say in a cell whether it equals one process."""
    try:
        proof = try_training(f"hf:{tiny}", way, seq)
    except (ShardwrightError, ValueError, RuntimeError) as error:
        return f"refused: {str(error).splitlines()[0][:80]}"
    return cell(proof)


def cell(proof: Proof) -> str:
    """Return a cell such as ``equal (98 % split)``."""
    verdict = "equal" if proof.is_equal else f"DIFFERS by {proof.difference:.0e}"
    tolerance = f"{proof.tolerance:.0e}".replace("e-0", "e-")
    precision = "" if proof.precision == "float64" else ", float32"
    return f"{verdict} to {tolerance}{precision}; {proof.split_share:.0%} split"


def line(row: Row) -> str:
    """Return one line of Markdown."""
    at_least = "" if row.captured == "whole" else "more than "
    cells = (
        f"`hf:{row.name}`", f"{row.parameters / 1e6:,.0f} M", row.captured,
        f"{row.num_operators:,}", f"{row.num_with_rule:,}", f"{at_least}{row.share:.2%}", f"{row.mixed:.1%}",
        f"{row.seconds:.1f} s", *row.proofs,
    )  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def page_text(lines: dict[str, str]) -> str:
    """Return what stands between the page's markers, given the table's lines by name."""
    threads = torch.get_num_threads()
    few = sum(is_covered(text) for text in lines.values())
    parts = [
        f"\nMeasured on {processor_name()} ({threads} thread{'s' * (threads > 1)} used), "
        f"{platform.system()}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, shardwright {__version__}; global batch "
        f"{GLOBAL_BATCH}. {few} of {len(lines)} architectures are captured whole with less than 5 % "
        f"of their modelled cost in operators that cannot be split.\n"
    ]
    for family in FAMILIES:
        group = representatives(family)
        parts.append(f"\n### {family[0].upper()}{family[1:]}\n\n{HEAD}")
        parts += [lines[name] + "\n" for _, name, _ in group if name in lines]
        missing = [f"`hf:{name}`" for _, name, _ in group if name not in lines]
        parts += [f"\nNot measured yet: {', '.join(missing)}.\n"] if missing else []
        tasks = {TASKS.get(kind, ("", "tokens"))[1] for kind, _, _ in group}
        words = "; ".join(sorted(TASK_WORDS[task] for task in tasks))
        names = ", ".join(f"`hf:{name}`" for name in FAMILIES[family])
        parts.append(f"\nThe batch holds: {words}. Names: {names}.\n")
    return "".join(parts) + "\n"


def is_covered(text: str) -> bool:
    """Whether a line says captured whole, and less than 5 % of the cost not splittable."""
    cells = text.split(" | ")
    return cells[2] == "whole" and float(cells[5].rstrip("%")) < 5


def write(new: dict[str, str]) -> None:
    """Put lines into the page; those of other architectures stay."""
    page = PAGE.read_text()
    head, rest = page.split(BEGIN)
    before, tail = rest.split(END)
    old = {
        text.split("`")[1][3:]: text for text in before.splitlines() if text.startswith("| `hf:")
    }
    PAGE.write_text(head + BEGIN + page_text(old | new) + END + tail)


def main() -> None:
    """Study every architecture asked for, print each as it is done, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="architectures, as in bert or t5; default: all")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    options = parser.parse_args()
    for family in FAMILIES:
        for kind, name, tiny in representatives(family):
            if options.names and kind not in options.names:
                continue
            text = line(study(kind, name, tiny))
            print(text, flush=True)
            if options.write:
                write({name: text})
            gc.collect()


if __name__ == "__main__":
    main()
