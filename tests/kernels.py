"""Have compiled what tests run: the planner's kernels, and the packages: `python -m tests.kernels`.

Workers that begin side by side would each compile what they need first, which takes longer than
their tests. A compiled kernel lies beside its source, so this takes a second from the second time on.
"""

import json
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
PACKAGES = (
    "import hypothesis, plotly.graph_objects, torch._dynamo, torch.export._trace, transformers"
)
# The published planners of profiles run beside ours.
LAYER = (
    "forward_compute_time=1.0, backward_compute_time=2.0, activation_size=1e3, parameter_size=8.0"
)
PROFILE = f"node1 -- a -- {LAYER}\nnode2 -- b -- {LAYER}\n\tnode1 -- node2\n"
# Two choices with two costs each; not both may take most.
CONTEST = {
    "nodes": {
        "intervals": [[0, 2], [1, 3]],
        "costs": [[1, 5], [2, 4]],
        "usages": [[6, 3], [6, 3]],
    },
    "edges": {"nodes": [[0, 1]], "costs": [[0, 0, 9, 1]]},
    "usage_limit": 10,
}


def main() -> int:
    """Plan a small model and a profile, solve a small contest problem and import the packages, side by side."""
    with tempfile.TemporaryDirectory() as folder:
        problem = Path(folder, "problem.json")
        problem.write_text(json.dumps({"problem": CONTEST}))
        profile = Path(folder, "profile.txt")
        profile.write_text(PROFILE)
        commands = (
            ["-c", SEARCH],
            ["-m", "shardwright", "iopddl", str(problem), "--seconds", "60"],
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
            ["-c", PACKAGES],
        )
        started = [
            subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=subprocess.DEVNULL)
            for command in commands
        ]
        return max(process.wait(timeout=300) for process in started)


if __name__ == "__main__":
    sys.exit(main())
