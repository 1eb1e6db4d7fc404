"""How good solutions of the IOPDDL contest's problems are: `python benchmarks/iopddl.py FOLDER`.

Every problem in the folder is solved by the command, in a process of its own, within the contest's
time limit. A score is the best cost of the contest's result table divided by ours. Best costs and
time limits: google/iopddl and asplos-contest/2025.

With `--families tune` (or `report`) problems unlike those are solved instead, in processor time: families
with planted answers, and variations of what is in the folder. What steers the solver may be set on the
half `tune` only. A score is then the planted cost divided by ours: at most 1 where the planted answer is
proved best (two words: the graph's shape, and whether most other choices are as good alone), else it may
be far above 1.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a script
from shardwright.files.iopddl import read_iopddl
from shardwright.verbs.iopddl import search
from tests.planner.solve.wide.certified import SHAPES, ZEROS, certified
from tests.planner.solve.wide.families import FAMILIES, Instance, planted, variation

BAR_MEAN_SCORE = 0.95
BAR_BYTES = 4 * 2**30

# Letter of the problem: time limit in seconds, best published cost where we know it.
CONTEST: dict[str, tuple[int, int | None]] = {
    "A": (60, 6_548_641_531),
    "B": (60, 532_843),
    "C": (60, 84_102_445_260),
    "D": (60, 313_613_524_736),
    "G": (120, 217_039),
    "K": (180, 2_274_276_676),
    "L": (180, 1_970_993_742),
    "M": (180, 49_928_460_991),
    "N": (180, 202_739_586_553),
    "P": (240, 662_197_407_330),
    "Q": (240, 526_776_842_042),
    "R": (240, 371_899_551_572),
    "S": (240, 1_534_613_444),
    "T": (240, 682_895_254_913),
    "U": (300, 2_569_342_178),
    "V": (300, 1_632_051),
    "Y": (300, 621_176_568_278),
}
OTHER_SECONDS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What the command found in one problem."""

    letter: str
    limit: float
    seconds: float
    peak_bytes: int
    answer: dict[str, object]

    @property
    def score(self) -> float | None:
        """Best published cost / ours; 0 where ours is over the limit."""
        best = CONTEST.get(self.letter, (0, None))[1]
        if best is None:
            return None
        return best / int(str(self.answer["cost"])) if self.answer["fits"] else 0.0


def solve(path: Path, scale: float, seed: int) -> Result:
    """Run the command on one problem and measure it from outside."""
    letter = path.name.split(".")[0].rsplit("-", 1)[-1]
    limit = CONTEST.get(letter, (OTHER_SECONDS, None))[0] * scale
    command = [sys.executable, "-m", "shardwright", "iopddl", str(path), "--json"]
    begin = time.perf_counter()
    done = subprocess.run(
        [*command, "--seconds", str(limit), "--seed", str(seed)],
        stdout=subprocess.PIPE,
        check=False,
    )
    seconds = time.perf_counter() - begin
    if done.returncode not in (0, 1) or not done.stdout:
        raise SystemExit(f"{path} could not be solved: exit code {done.returncode}")
    # The largest of all runs so far; Linux counts in KiB.
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    answer = json.loads(done.stdout)
    return Result(letter=letter, limit=limit, seconds=seconds, peak_bytes=peak, answer=answer)


def show(results: list[Result]) -> None:
    """Print the table and whether the bars are reached."""
    console = Console(width=110)
    table = Table(title="IOPDDL problems at the contest's time limits")
    for name in ("problem", "cost", "lower bound", "gap", "score", "fits", "limit/s", "took/s"):
        table.add_column(name, justify="right")
    for result in results:
        answer = result.answer
        score = "unknown" if result.score is None else f"{result.score:.4f}"
        gap = "0, proved" if answer["is_optimal"] else f"{answer['gap']:.3%}"
        cost, bound = f"{answer['cost']:,}", f"{answer['bound']:,.0f}"
        fits = "yes" if answer["fits"] and answer["is_allowed"] else "no"
        table.add_row(
            result.letter, cost, bound, gap, score, fits,
            f"{result.limit:.0f}", f"{result.seconds:.1f}",
        )  # fmt: skip
    console.print(table)
    scores = [result.score for result in results if result.score is not None]
    if scores:
        mean = sum(scores) / len(scores)
        verdict = "reached" if mean >= BAR_MEAN_SCORE else "missed"
        console.print(f"Mean score {mean:.4f}; bar of {BAR_MEAN_SCORE}: {verdict}")
    most = max(result.peak_bytes for result in results)
    verdict = "reached" if most <= BAR_BYTES else "missed"
    console.print(f"Peak memory {most / 2**30:.2f} GiB; bar of 4 GiB: {verdict}")
    load = os.getloadavg()[0]
    console.print(
        f"{platform.processor() or platform.machine()} x {os.cpu_count()}; {platform.system()}; "
        f"Python {platform.python_version()}; load of the machine at the end {load:.1f}"
    )


# Variations of the contest's problems: letter, what changes, by how much.
VARIATIONS = {
    "tune": [("B", "limit", 0.94), ("M", "limit", 0.93), ("G", "forbid", 0.3), ("S", "shuffle", 0)],
    "report": [
        ("G", "limit", 0.92),
        ("A", "limit", 1.4),
        ("S", "limit", 0.95),
        ("A", "shuffle", 0),
    ],
}


def instances(half: str, folder: Path) -> Iterator[tuple[str, Instance]]:
    """Yield the problems of a half, with names."""
    for family in FAMILIES:
        yield family, planted(family, list(VARIATIONS).index(half))
    for shape in SHAPES:
        for kind in ZEROS:
            yield f"{shape}, {kind}", certified(shape, kind, list(VARIATIONS).index(half))
    for letter, kind, amount in VARIATIONS[half]:
        for path in sorted(folder.glob(f"*iopddl-{letter}.json*")):
            made = variation(read_iopddl(path), letter, kind, amount)
            yield made.family, made


def show_families(half: str, folder: Path, only: str, seconds: float) -> None:
    """Solve every problem of a half within that much processor time and print how it went."""
    table = Table(title=f"Problems to {half}, {seconds:g} s of processor time each")
    for name in ("problem", "cost", "score", "gap", "first legal/s", "took/s"):
        table.add_column(name, justify="left" if name == "problem" else "right")
    for name, made in instances(half, folder):
        if only and only not in name:
            continue
        begin = time.process_time()
        legal: list[float] = []

        def spent(begin: float = begin) -> float:
            return (time.process_time() - begin) / seconds

        def tell(text: str, legal: list[float] = legal, begin: float = begin) -> None:
            if "best" in text and not legal:
                legal.append(time.process_time() - begin)

        choice, bound, is_impossible = search(made.problem, spent, tell)
        took = time.process_time() - begin
        cost = made.problem.evaluate(choice)
        limit = made.problem.limit
        fits = limit is None or made.problem.peak(choice) <= limit
        if not (fits and made.problem.is_allowed(choice)):
            table.add_row(name, "proved impossible" if is_impossible else "none", "0")
            continue
        score = "" if made.known is None else f"{made.known / max(1, cost):.4f}"
        table.add_row(
            name, f"{cost:,}", score, f"{max(0.0, 1 - bound / max(1, cost)):.2%}",
            f"{legal[0]:.1f}" if legal else f"{took:.1f}", f"{took:.1f}",
        )  # fmt: skip
    Console(width=110).print(table)


def main() -> int:
    """Solve every problem of a folder and show how it went."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="letters of the problems to solve")
    parser.add_argument("--scale", type=float, default=1.0, help="of the contest's time limits")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--families", choices=list(VARIATIONS), help="problems unlike the contest's"
    )
    parser.add_argument("--seconds", type=float, default=15.0, help="for one of those")
    options = parser.parse_args()
    if options.families:
        show_families(options.families, options.folder, options.only, options.seconds)
        return 0
    paths = sorted(options.folder.glob("*iopddl-*.json*"))
    paths = [p for p in paths if not options.only or p.name.split(".")[0][-1] in options.only]
    if not paths:
        raise SystemExit(f"{options.folder} has no problems named ...iopddl-LETTER.json[.gz]")
    results: list[Result] = []
    for path in paths:
        results.append(solve(path, options.scale, options.seed))
        print(f"{results[-1].letter}: {results[-1].answer['cost']:,}", file=sys.stderr, flush=True)
    show(results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
