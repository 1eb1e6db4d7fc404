"""The walls of the house: who may import whom, and what must stay unloaded."""

import ast
import importlib.machinery
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
AS_A_SCRIPT = "sys.path.insert(0, str(Path(__file__).resolve().parent"

WITHOUT_TORCH = {
    "planner": "import shardwright.planner.search, shardwright.planner.lower",
    "package": "import shardwright; shardwright.Plan; shardwright.read_plan; shardwright.plan",
    "reports": "import shardwright.report.html, shardwright.report.perfetto",
    "caching": "import shardwright.caching",
    "files": "import shardwright.files.planfile, shardwright.files.clusterfile, shardwright.store",
}


def modules_after(code):
    script = f"{code}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_importing_loads_no_torch():
    """All in one process: the first that loads it is named."""
    lines = ["import sys"]
    for name, code in WITHOUT_TORCH.items():
        lines += [code, f"assert 'torch' not in sys.modules, {name!r}"]
    modules_after("\n".join(lines))


def test_planning_a_profile_loads_neither_torch_nor_what_plans_models(tmp_path):
    """It is over in less than a second, most of which is importing Numba."""
    fields = "forward_compute_time=1.0, backward_compute_time=1.0, activation_size=1.0"
    (tmp_path / "graph.txt").write_text(f"a -- Linear -- {fields}, parameter_size=1.0\n")
    code = (
        "import sys\n"
        f"sys.argv[1:] = ['plan', '--profile', {str(tmp_path / 'graph.txt')!r},"
        " '--workers', '2', '--bandwidth', '1e9']\n"
        "from shardwright.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert end.code == 0\n"
    )
    loaded = modules_after(code)
    assert "shardwright.layerwise.kernel" in loaded
    assert not loaded & {
        "torch", "plotly", "highspy", "sqlite3", "shardwright.api", "shardwright.store",
        "shardwright.planner.search", "shardwright.core.program", "shardwright.files.planfile",
    }  # fmt: skip


@pytest.mark.parametrize(
    "script", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda one: one.stem
)
def test_a_benchmark_finds_what_it_imports_when_it_runs_as_a_script(script):
    """Of itself a script sees its own folder, not the one above, where ``tests`` is."""
    text = script.read_text()
    found = [node for node in ast.parse(text).body if isinstance(node, ast.ImportFrom | ast.Import)]
    names = {alias.name for node in found if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in found if isinstance(node, ast.ImportFrom)}
    own = [str(script.parent), *([str(ROOT)] if AS_A_SCRIPT in text else [])]
    path = [one for one in sys.path if Path(one or ".").resolve() != ROOT]
    for name in {name.partition(".")[0] for name in names} - set(sys.builtin_module_names):
        assert importlib.machinery.PathFinder.find_spec(name, [*own, *path]), name
