"""Published runs beside predictions: `python benchmarks/published.py runs.csv --write`.

Plans every run of a file exactly as it is printed (`shardwright validate`) and prints what errors add up to; with
`--write` that becomes `docs/reference/validation.md`. Figures of single runs stay out of the page: the file has them, and
`shardwright validate runs.csv --cases` shows them.
"""

from __future__ import annotations

import argparse
import datetime
import platform
from importlib import metadata
from pathlib import Path

from processor import processor_name

from shardwright import __version__, api
from shardwright.core.accuracy import Validation
from shardwright.report.validation import SOURCE_COLUMNS, lines, source_rows

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "validation.md"
BEGIN, END = "<!-- generated: begin -->\n", "<!-- generated: end -->\n"


def text_of(found: Validation) -> str:
    """Return the generated part of the page."""
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "numpy"))
    today = datetime.datetime.now(datetime.UTC).date()
    head = [
        f"`python benchmarks/published.py {found.file} --write`, {today}, shardwright {__version__}, "
        f"Python {platform.python_version()}, {versions}; {found.seconds:.0f} s on {processor_name()}.",
        "",
        "| " + " | ".join(name.strip() for name in SOURCE_COLUMNS) + " |",
        "|---" + "|---:" * (len(SOURCE_COLUMNS) - 1) + "|",
        *("| " + " | ".join(row) + " |" for row in source_rows(found)),
        "",
    ]
    said = [line for line in lines(found) if not line.startswith(" ")]
    reasons = ["", "| runs | cannot be expressed because |", "|---:|---|"]
    reasons += [f"| {count} | {reason} |" for reason, count in found.reasons]
    return "\n".join([*head, *(f"* {line[0].upper()}{line[1:]}." for line in said), *reasons, ""])


def main() -> None:
    """Print the text, or write it into the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    text = text_of(api.validate(given.file))
    print(text)
    if given.write:
        head, rest = PAGE.read_text().split(BEGIN)
        PAGE.write_text(head + BEGIN + text + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
