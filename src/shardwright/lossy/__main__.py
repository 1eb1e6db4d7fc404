"""``python -m shardwright.lossy leaves --device eth0 --rate 10gbit``: prints a switch's commands.

With ``--apply`` they are run, with ``--undo`` taken back.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from shardwright.errors import InputError
from shardwright.lossy.switches import RECIPES, recipe


def main(arguments: Sequence[str] | None = None) -> int:
    """Print, run or take back a recipe; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m shardwright.lossy", description=__doc__)
    parser.add_argument("recipe", choices=list(RECIPES))
    parser.add_argument("--device", required=True, help="that leads to the receivers")
    parser.add_argument("--rate", required=True, help="of its line, such as 10gbit")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--apply", action="store_true", help="run the commands (needs root)")
    what.add_argument("--undo", action="store_true", help="take them back (needs root)")
    given = parser.parse_args(arguments)
    try:
        chosen = recipe(given.recipe, given.device, given.rate)
        if given.apply:
            chosen.apply()
        if given.undo:
            chosen.revert()
    except InputError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    lines = chosen.undo if given.undo else (*chosen.setup, "# undo:", *chosen.undo)
    sys.stdout.write("\n".join((*lines, f"# counters: {chosen.counters}", "")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
