"""Have compiled what tests run: the planner's kernels, and the packages: `python -m tests.kernels`.

Workers that begin side by side would each compile what they need first, which takes longer than
their tests. A compiled kernel lies beside its source, so this takes a second from the second time on.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# It needs the kernels of any search, and little time.
SEARCH = """
from shardwright.core.costs import CostTable
from shardwright.planner.search import Limits, search
from tests.planner.search.models import cluster, mlp

search(mlp(), cluster(2, 2, flops=1e10), CostTable(), limits=Limits(max_candidates=2))
"""
# Problems that only searching around solves, counted in rounds: within a time it may not begin to.
WIDE = """
from shardwright.contest import solve
from tests.planner.solve.wide.problems import random_problem

for seed in range(4):
    solve(random_problem(seed, num_nodes=20, num_edges=36, most=4), lambda count: count / 20)
"""
# What ranks that merge selections wait for in their first step, each of them.
MERGES = """
import numpy as np
from shardwright.runtime.merges import merge_units, places_among

places, counts = np.arange(2), np.array([2])
for dtype in (np.float32, np.float64):
    one, kept, rest = ((places.copy(), np.ones(2, dtype)) for _ in range(3))
    merge_units(one, one, counts, kept, rest)
places_among(places, places, counts)
"""
# What tests assert is compiled once, too, for all workers.
PACKAGES = """
import pytest

pytest.main(["--collect-only", "-qq"])
import hypothesis, plotly.graph_objects, torch._dynamo, torch.export._trace, transformers
"""
# The published planners of profiles run beside ours.
LAYER = (
    "forward_compute_time=1.0, backward_compute_time=2.0, activation_size=1e3, parameter_size=8.0"
)
PROFILE = f"node1 -- a -- {LAYER}\nnode2 -- b -- {LAYER}\n\tnode1 -- node2\n"


def main() -> int:
    """Plan a small model and a profile, solve wide problems, merge and import the packages, side by side."""
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder, "profile.txt")
        profile.write_text(PROFILE)
        commands = (
            ["-c", SEARCH],
            [
                "-m",
                "shardwright",
                "plan",
                "--profile",
                str(profile),
                "--workers",
                "2",
                "--bandwidth",
                "1e9",
            ],
            ["-c", WIDE],
            ["-c", MERGES],
            ["-c", PACKAGES],
        )
        started = [
            subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=subprocess.DEVNULL)
            for command in commands
        ]
        return max(process.wait(timeout=300) for process in started)


if __name__ == "__main__":
    sys.exit(main())
