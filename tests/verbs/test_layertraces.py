"""Iterations of a trace file by the network that is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwright.api import predict_trace
from shardwright.report.layertraces import iteration_rows
from shardwright.verbs.tracerequest import TraceRequest

TRACE = "name,forward_ms,backward_ms,bytes\na,1,2,4096\nb,1,2,400000\n"


def layers(folder: Path) -> Path:
    file = folder / "layers.csv"
    file.write_text(TRACE)
    return file


def test_what_is_marked_loses_nothing_also_where_choosing_takes_no_time(tmp_path: Path):
    asked = TraceRequest(workers="1,4", link="1GbE", select=0.0)
    found = predict_trace(layers(tmp_path), asked).iterations
    for workers in (1, 4):
        rows = list(iteration_rows([one for one in found if one.workers == workers]))
        marked = [exchange for _, exchange, _, seconds, *_ in rows if "\u25b8" in seconds]
        assert marked[-1] == "merged (MG-WFBP's rule)"
        assert all("top-k" not in one.lower() for one in marked)


@pytest.mark.parametrize("workers", [1, 4])
def test_measured_messages_lie_on_lines_that_do_not_fall(tmp_path: Path, workers: int):
    table = tmp_path / "messages.csv"
    table.write_text("bytes,seconds\n8192,0.2\n16384,0.1\n32768,0.3\n")
    asked = TraceRequest(workers=f"{workers}", link=f"{table}")
    found = {one.exchange: one for one in predict_trace(layers(tmp_path), asked).iterations}
    beyond = 0.3 + (400_000 - 32768) * 0.1 / 16384
    assert found["naive"].network_seconds == pytest.approx((0.2 + beyond) * (workers > 1))
    assert set(found) == {"naive", "wait-free", "merged", "mg-wfbp"}
