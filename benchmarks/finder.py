"""How many of the rules the finder finds again: `python -m benchmarks.finder --write`.

Hides the rule of every kind, lets the finder look for one by the kind's example calls, and compares
its lines with the table dim by dim. Prints one line for each kind as it is done, and keeps it with `--log FILE` so that it can go on; with `--write` the
summary becomes part of docs/guides/add-an-operator.md. Kinds given as arguments restrict it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a script

from shardwright.operators.splitting.rules import KIND
from tests.verbs.found import Found, found_again

PAGE = Path(__file__).resolve().parent.parent / "docs" / "guides" / "add-an-operator.md"
BEGIN, END = "<!-- generated: begin -->\n", "<!-- generated: end -->\n"
WORDS = {
    "all": "everything that the table has",
    "weaker": "some of the dims",
    "none": "no dim, though the table has some",
    "nothing to find": "the table splits no example either",
}


def verdict(found: Found) -> str:
    """Say in a word how the proposal compares with the table."""
    if not found.known:
        return "nothing to find"
    if not found.again:
        return "none"
    return "all" if found.again == found.known else "weaker"


def study(kind: str) -> dict[str, Any]:
    """Hide one kind's rule and return a line about what was found."""
    begin = time.perf_counter()
    found = found_again(kind)
    return {
        "kind": kind,
        "verdict": verdict(found),
        "seconds": round(time.perf_counter() - begin, 2),
        "known": found.known,
        "again": found.again,
        "more": found.more,
        "reasons": dict(found.reasons),
        "sums": found.sums,
        "lines": found.proposal.lines,
        "crashes": found.proposal.num_crashes,
        "problem": found.proposal.problem,
    }


def summary(rows: list[dict[str, Any]]) -> str:
    """Return the table in Markdown."""
    verdicts = Counter(row["verdict"] for row in rows)
    reasons: Counter[str] = Counter()
    for row in rows:
        reasons.update(row["reasons"].keys())
    lines = ["", "| found of a hidden rule | kinds |", "|---|--:|"]
    lines += [f"| {words} | {verdicts[name]} |" for name, words in WORDS.items()]
    lines += [f"| **all kinds** | {len(rows)} |", ""]
    lines += ["| why a dim is not found | kinds |", "|---|--:|"]
    lines += [f"| {words} | {count} |" for words, count in reasons.most_common()]
    known, again = sum(row["known"] for row in rows), sum(row["again"] for row in rows)
    sums = [sum(row["sums"][at] for row in rows) for at in (0, 1)]
    named = {
        "Cut further than by the table": [row["kind"] for row in rows if row["more"]],
        "Not all found": [row["kind"] for row in rows if row["verdict"] in ("weaker", "none")],
        "Wrong cuts end the process": [row["kind"] for row in rows if row["crashes"]],
    }
    lines += [
        "",
        f"Of {known:,} dims of all example calls {again:,} are found again, and of {sums[0]} calls "
        f"through which partial sums pass {sums[1]}.",
        f"Two random shapes per example, seed 0, torch {torch.__version__}.",
        "",
    ]
    for title, kinds in named.items():
        listed = ", ".join(f"`{kind.removeprefix('aten.')}`" for kind in kinds)
        lines += [f"{title}: {listed or 'none'}.", ""]
    return "\n".join(lines)


def main() -> None:
    """Study every kind asked for, print each as it is done, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", help="such as aten.mm.default; default: all")
    parser.add_argument("--log", type=Path, help="keep lines here, and take up those it has")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    options = parser.parse_args()
    known: dict[str, dict[str, Any]] = {}
    if options.log and options.log.exists():
        kept = [json.loads(text) for text in options.log.read_text().splitlines()]
        known = {row["kind"]: row for row in kept}
    rows: list[dict[str, Any]] = []
    for kind in options.kinds or sorted(KIND):
        rows.append(known.get(kind) or study(kind))
        if kind in known:
            continue
        text = json.dumps(rows[-1])
        print(text, flush=True)
        if options.log:
            with options.log.open("a") as file:
                file.write(text + "\n")
    print(summary(rows))
    if options.write:
        head, rest = PAGE.read_text().split(BEGIN)
        PAGE.write_text(head + BEGIN + summary(rows) + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
