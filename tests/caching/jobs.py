"""Jobs that share what they prepare, for tests: a data set that says what it does, and processes that iterate."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np

from shardwright.caching import SharedLoader, Sharing
from shardwright.caching import board as board_module

SAMPLES = 60


class Told:
    """Samples of a number, an augmentation and some bytes; each preparation is a line of a file."""

    def __init__(self, log: Path, count: int = SAMPLES, seconds: float = 0.0) -> None:
        self.log, self.count, self.seconds = log, count, seconds

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict:
        time.sleep(self.seconds)
        drawn = [random.random(), float(np.random.rand())]
        file = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(file, f"{index} {os.getpid()} {drawn[0]}\n".encode())
        os.close(file)
        return {"index": index, "drawn": drawn, "array": np.full(index % 5, index, np.int32)}


def prepared(log: Path) -> list[tuple[int, float]]:
    """Return what was prepared, in order: index and what was drawn first."""
    lines = map(str.split, log.read_text().splitlines())
    return [(int(index), float(drawn)) for index, _, drawn in lines]


def sharing(folder: Path, **changed: object) -> Sharing:
    """Return how the tests' jobs share; nobody is waited for until a test's end."""
    return Sharing(
        **{
            "name": "j",
            "seed": 3,
            "chunk": 4,
            "depth": 4,
            "patience": 100.0,
            "folder": folder,
            **changed,
        }
    )


def train(
    how: Sharing, out: Path, batch: int, epochs: int, seconds: float, workers: int, prepare: float
) -> None:
    """Iterate, and write what came: a line of samples per epoch."""
    data = Told(how.folder / "log", seconds=prepare)
    with (
        SharedLoader(data, how, batch_size=batch, workers=workers) as loader,
        out.open("w") as file,
    ):
        for _ in range(epochs):
            found = []
            for samples in loader:
                time.sleep(seconds)
                assert all((one["array"] == one["index"]).all() for one in samples)
                found += [[one["index"], *one["drawn"]] for one in samples]
                (out.with_suffix(".at")).write_text(str(len(found)))
            file.write(json.dumps(found) + "\n")
            file.flush()
        counts = {"prepared": loader.prepared, "taken": loader.taken, "alone": loader.alone}
        file.write(json.dumps(counts) + "\n")


def die_on_line(how: Sharing, line: int) -> None:
    """Iterate, and be killed before the n-th line that changes what jobs share; end with 3 if there are fewer."""
    changing = {
        "take",
        "stage",
        "done",
        "_written",
        "begin_epoch",
        "_strike",
        "_take",
        "live",
        "close",
        "_bury",
    }
    files = {board_module.__file__, sys.modules[SharedLoader.__module__].__file__}
    left = [line]

    def trace(frame, event, _):
        if frame.f_code.co_filename not in files or frame.f_code.co_name not in changing:
            return trace if event == "call" else None
        if event == "line":
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)
    with SharedLoader(Told(how.folder / "log"), how, batch_size=4) as loader:
        next(iter(loader))
    sys.settrace(None)
    os._exit(3)
