"""Batches of graphs laid end to end, whose tensors have a row per node, per edge or per graph."""

from __future__ import annotations

from pathlib import Path

import pytest

import shardwright
from shardwright.verbs.request import Request, Trial, Watch
from shardwright.verbs.study import study
from shardwright.verbs.subject import capture

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("short_climbs")]
MODEL = """
import torch
from torch import nn

class Graphs(nn.Module):
    def __init__(self):
        super().__init__()
        self.atoms, self.bonds = nn.Embedding(9, 16), nn.Embedding(3, 16)
        self.layer, self.head = nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, atoms, edges, bonds, graph, energy):
        x, (source, target) = self.atoms(atoms), edges
        told = (x[source] + self.bonds(bonds)).relu()
        most = told.new_zeros(x.shape).scatter_reduce(0, target[:, None].expand_as(told), told, "amax")
        x = self.layer(x + most).relu()
        pooled = x.new_zeros(energy.shape[0], 16).index_add(0, graph, x)
        return nn.functional.l1_loss(self.head(pooled).squeeze(-1), energy)

def build():
    return Graphs()

def build_batch(batch_size=4):
    count, draw = torch.arange(batch_size), torch.Generator().manual_seed(0)
    edges = torch.randint(6, (2, 15 * batch_size), generator=draw)
    return {
        "atoms": torch.randint(9, (6 * batch_size,), generator=draw),
        "edges": edges + 6 * count.repeat_interleave(15),
        "bonds": torch.randint(3, (15 * batch_size,), generator=draw),
        "graph": count.repeat_interleave(6),
        "energy": torch.randn(batch_size, generator=draw),
    }
"""


def test_a_plan_for_graphs_is_for_as_many_nodes_and_fits_its_model(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(MODEL)
    model = f"{tmp_path / 'net.py'}:build"
    found = study(model, "1x2xH100", Request(precision="float32"), Watch())
    plan = found.frontier.best
    assert plan.global_batch == 6 * 4
    again = capture(model, global_batch=plan.global_batch, precision="float32").graph
    assert again.fingerprint == plan.graph_fingerprint


def test_a_plan_for_graphs_is_verified_on_as_few_as_refer_to_each_other(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(MODEL)
    model = f"{tmp_path / 'net.py'}:build"
    found = study(model, "1x2xH100", Request(precision="float32"), Watch())
    verified = shardwright.verify(found.frontier, Trial(model=model))
    assert verified.is_equal
    assert verified.global_batch == 6
