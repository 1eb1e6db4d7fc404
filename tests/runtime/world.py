"""Several ranks for a test: ``run_ranks(2, function, argument)`` runs the function on each of them.

Functions must be importable (module level). The fork server has torch preloaded, so that after the
first call a world costs a fraction of a second. ``run_script`` and ``run_hosts`` give ranks what
torchrun gives them, variables instead of a world: where torchrun itself is not what a test is about,
that saves the three processes that import torch anew, six seconds of a processor each.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import multiprocessing
import os
import runpy
import socket
import sys
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardwright.runtime.launch import CAPTURING, PRELOADED, STORE_FILE, launch
from shardwright.runtime.scratch import claim_multiprocessing
from shardwright.runtime.status import STATUS_DIRECTORY

ROOT = Path(__file__).parents[2]
# What tests, and the scripts and commands of users, import on ranks: two fifths of what a run takes there.
USED = ("pytest", "hypothesis", "shardwright.api", "shardwright.verbs.training")
FIRST_HOST, PORT = "10.84.0.1", "29500"
NETWORK = 0x40000000  # CLONE_NEWNET: Python 3.12 has os.setns


def serve() -> None:
    """Start what ranks are forked from, unless it runs, with what many of them do first done already: what
    most files of tests import takes a rank five times as long as all else that it begins with."""
    claim_multiprocessing()
    imported = [*PRELOADED, *CAPTURING, *USED, "tests.runtime.warm"]
    multiprocessing.set_forkserver_preload(imported)
    with contextlib.chdir(ROOT):  # where it finds the tests
        forkserver.ensure_running()


def run_ranks(n: int, fn: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
    """Run ``fn(*args)`` on ``n`` ranks of a fresh world; return their results in rank order."""
    serve()
    return launch(fn, n, args, timeout=timeout, collective_timeout=timeout / 2)


def run_hosts(
    hosts: Sequence[str], fn: Callable[..., Any], *args: Any, timeout: float = 100
) -> list[Any]:
    """Run ``fn(*args)`` on a rank in each host's namespace; it joins the world of the first one itself."""
    variables = {
        "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": FIRST_HOST, "MASTER_PORT": PORT,
        "GLOO_SOCKET_IFNAME": "eth0",
    }  # fmt: skip
    return launch(_outside, len(hosts), (variables, tuple(hosts), fn, args), timeout=timeout)


def run_script(file: Path, ranks: int = 2, hosts: Sequence[str] = ()) -> list[str]:
    """Run a user's script on ranks of this machine, or one on each host; return what each printed."""
    if hosts:
        return run_hosts(hosts, _run_file, str(file))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return launch(_outside, ranks, (variables, (), _run_file, (str(file),)), timeout=100)


def _outside(
    variables: dict[str, str], hosts: tuple[str, ...], fn: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    """Leave the launcher's world for torchrun's variables and the rank's host."""
    dist.barrier()  # who leaves as soon as it is connected may be gone before the other has seen it
    dist.destroy_process_group()
    del os.environ[STORE_FILE], os.environ[STATUS_DIRECTORY]
    os.environ |= variables
    if hosts:
        _enter(hosts[int(os.environ["RANK"])])
    return fn(*args)


def _enter(host: str) -> None:
    """Move this thread, and those that it will start, into a host's network."""
    with Path("/var/run/netns", host).open() as namespace:
        library = ctypes.CDLL(None, use_errno=True)
        if library.setns(namespace.fileno(), NETWORK):
            raise OSError(ctypes.get_errno(), f"no way into {host}")


def _run_file(file: str) -> str:
    """Run a script as Python would; no thread of gloo may be left, since one that outlives its process
    group aborts one run in five at the interpreter's end."""
    os.chdir(Path(file).parent)
    sys.path.insert(0, str(Path(file).parent))
    sys.argv = [file]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(file, run_name="__main__")
    tasks = [one.read_text().strip() for one in Path("/proc/self/task").glob("*/comm")]
    left = [name for name in tasks if "gloo" in name]
    if left:
        raise RuntimeError(f"threads outlive the script: {left}")
    return out.getvalue()
