"""Have the planner's kernels compiled: `python -m tests.kernels`.

Workers that begin side by side would each compile what they need first, which takes longer than
their tests. A compiled kernel lies beside its source, so this takes a second from the second time on.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
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
    """Plan a small model and solve a small contest problem, at the same time."""
    with tempfile.TemporaryDirectory() as folder:
        problem = Path(folder, "problem.json")
        problem.write_text(json.dumps({"problem": CONTEST}))
        commands = (
            [str(ROOT / "examples" / "01_plan_from_a_graph.py")],
            ["-m", "shardwright", "iopddl", str(problem), "--seconds", "60"],
        )
        started = [
            subprocess.Popen([sys.executable, *command], cwd=folder, stdout=subprocess.DEVNULL)
            for command in commands
        ]
        return max(process.wait(timeout=300) for process in started)


if __name__ == "__main__":
    sys.exit(main())
