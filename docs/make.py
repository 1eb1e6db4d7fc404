"""Write again what documents take from the program: cli.md, example outputs, README's output.

``tests/docs`` compares the same texts with the files, so that none of them can go stale.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CLI_PAGE = ROOT / "docs" / "reference" / "cli.md"
README = ROOT / "README.md"
BEGIN, END = "<!-- generated: begin -->\n", "<!-- generated: end -->\n"
README_EXAMPLE = re.compile(
    r"```python\n(?P<code>.*?)```\n\n```text\n(?P<output>.*?)```\n", re.DOTALL
)
README_TABLE = re.compile(
    r"```sh\nshardwright (?P<words>plan hf:.*)\n```\n\n```text\n(?P<output>.*?)```\n", re.DOTALL
)
WIDTH, TABLE_WIDTH = 88, 110


def cli_text() -> str:
    """Return the page between its markers: the help of every command."""
    from typer.main import get_command

    from shardwright.cli import app

    parts: list[str] = []
    for title, command in _commands("shardwright", get_command(app)):
        with command.make_context(
            title, [], resilient_parsing=True, terminal_width=WIDTH
        ) as context:
            text = command.get_help(context)
        body = "\n".join(line.rstrip() for line in text.splitlines())
        parts.append(f"## {title}\n\n```text\n{body}\n```\n")
    return "\n" + "\n".join(parts) + "\n"


def _commands(title: str, command: Any) -> Iterator[tuple[str, Any]]:
    """Yield a command and those inside it, with what is typed to call them."""
    yield title, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from _commands(f"{title} {name}", inner)


def cli_page(page: str) -> str:
    """Return the page with a fresh middle."""
    head, rest = page.split(BEGIN)
    return head + BEGIN + cli_text() + END + rest.split(END)[1]


def examples() -> list[Path]:
    """Return the example scripts in order."""
    return sorted((ROOT / "examples").glob("[0-9]*.py"))


def output_of(*command: str, **variables: str) -> str:
    """Run Python in its own process, away from the user's measurements, and return what it printed."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "SHARDWRIGHT_STORE": os.devnull,
        **variables,
    }
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env=environment, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed:\n{done.stderr}")
    return done.stdout


def readme_example(page: str) -> tuple[str, str]:
    """Return README's Python example and the output printed under it."""
    found = README_EXAMPLE.search(page)
    if found is None:
        raise ValueError("README.md needs a python block followed by a text block with its output")
    return found["code"], found["output"]


def readme_table(page: str) -> tuple[list[str], str]:
    """Return the words of README's plan command and the frontier printed under it."""
    found = README_TABLE.search(page)
    if found is None:
        raise ValueError(
            "README.md needs a plan command followed by a text block with its frontier"
        )
    return found["words"].split(), found["output"]


def frontier_of(words: list[str]) -> str:
    """Return the frontier that a plan command prints, without what it says of it."""
    with tempfile.TemporaryDirectory() as folder:
        command = ("-m", "shardwright", *words, "--out", str(Path(folder, "plan.json")))
        return frontier_in(output_of(*command, COLUMNS=str(TABLE_WIDTH)))


def frontier_in(text: str) -> str:
    """Return the frontier at the head of what a plan command printed."""
    lines = text.partition("\n\n")[0].splitlines()
    return "".join(line.rstrip() + "\n" for line in lines)


def main() -> None:
    """Write everything."""
    CLI_PAGE.write_text(cli_page(CLI_PAGE.read_text()))
    for script in examples():
        script.with_suffix(".out").write_text(output_of(str(script)))
    page = README.read_text()
    code, output = readme_example(page)
    page = page.replace(f"```text\n{output}```", f"```text\n{output_of('-c', code)}```")
    words, table = readme_table(page)
    README.write_text(page.replace(f"```text\n{table}```", f"```text\n{frontier_of(words)}```"))
    print("wrote docs/reference/cli.md, examples/*.out and the outputs in README.md")


if __name__ == "__main__":
    main()
