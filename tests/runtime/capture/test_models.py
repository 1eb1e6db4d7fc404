"""Models by name: what is found, and what is said where nothing is."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from shardwright.errors import CaptureError, InputError
from shardwright.runtime.capture import capture, load_model
from shardwright.runtime.capture.tasks import KNOWN_CONFIGS
from shardwright.verbs import subject

pytestmark = pytest.mark.torch

FILE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
    def forward(self, x):
        return self.linear(x).pow(2).mean()

def pair():
    return Model(), {"x": torch.zeros(2, 4)}

def alone():
    return Model()

def alone_batch(batch_size):
    return {"x": torch.zeros(batch_size, 4)}

def usual(batch_size=6):
    return Model(), {"x": torch.zeros(batch_size, 4)}

def open():
    return Model()

def open_batch(batch_size=None, seq=3):
    return {"x": torch.zeros(batch_size or 10, 4)}

def broken():
    raise KeyError("no such thing")

def wrong():
    return 3

def leaves():
    raise SystemExit("bye")

def alone_data(batch_size):
    return None

def usual_data(batch_size):
    yield {"x": torch.zeros(batch_size, 4)}
    raise LookupError("no second file")

def open_data(batch_size):
    return iter(())

def held_out_data(batch_size):
    raise SystemExit("nothing kept")
    yield
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.py"
    path.write_text(FILE)
    return path


@pytest.mark.parametrize("factory", ["pair", "alone"])
def test_a_factory_in_a_file_gives_a_module_and_a_batch_of_any_size(
    file: Path, factory: str
) -> None:
    source = load_model(f"{file}:{factory}")
    assert source.build().linear.weight.is_meta
    batch = source.example(6)
    assert batch["x"].shape == (6, 4)
    assert capture(source.build(), batch).graph.num_parameters == 20


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nothing.py:build", "no file"),
        ("{file}:absent", "has no function 'absent'.*pair"),
        ("no.such.package:build", "importing no.such.package failed"),
        ("gpt2", "hf:gpt2"),
        ("hf:gpt17", "known names nearest to it are gpt2"),
    ],
)
def test_a_model_that_does_not_exist_is_refused(file: Path, spec: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_model(spec.format(file=file))


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("broken", r"KeyError at model.py:\d+: 'no such thing'"),
        ("wrong", "must return a torch.nn.Module.*int"),
        ("leaves", r"SystemExit at model.py:\d+: bye"),
    ],
)
def test_a_factory_that_fails_is_quoted(file: Path, factory: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_model(f"{file}:{factory}").build()


def test_data_that_cannot_be_iterated_over_is_refused(file: Path) -> None:
    with pytest.raises(InputError, match=r"returned NoneType; let it yield .* \(at model.py:\d+\)"):
        load_model(f"{file}:alone").batches(4)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "usual",
            r"raised LookupError: no second file, at model.py:\d+, for batch 1 \(from 0\); see",
        ),
        ("open", "have a batch of 4 samples, but ends before the first; let it give some"),
    ],
)
def test_data_that_fails_on_its_way_is_refused_in_a_line(file: Path, name: str, says: str) -> None:
    source = load_model(f"{file}:{name}")
    with pytest.raises(InputError, match=f"the data of model '{name}' must .*{says}"):
        source.first(4, None, 2)
    with pytest.raises(InputError, match=f"held-out data of model '{name}' .*SystemExit: nothing"):
        source.held_out(4)


def test_a_file_that_cannot_be_imported_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("import nothing_of_that_name")
    with pytest.raises(InputError, match="ModuleNotFoundError"):
        load_model(f"{tmp_path / 'bad.py'}:build")
    (tmp_path / "script.py").write_text("import sys\nsys.exit(3)")
    with pytest.raises(InputError, match=r"failed with SystemExit at script.py:2: 3; fix"):
        load_model(f"{tmp_path / 'script.py'}:build")


@pytest.mark.parametrize(
    "name",
    ["gpt2-tiny", "llama-tiny", "bert-tiny", "t5-tiny", "vit-tiny", "resnet-tiny", "mixtral-tiny"],
)
def test_known_names_are_captured_whole(name: str) -> None:
    source = load_model(f"hf:{name}")
    graph = capture(source.build(), source.example(4), global_batch=8, name=name).graph
    assert not any(op.kind.startswith("opaque") for op in graph.operators)
    assert len({block.signature for block in graph.blocks}) < len(graph.blocks) or name == "t5-tiny"


def test_a_config_file_builds_the_model_it_describes(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(
        '{"model_type": "gpt2", "n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 64}'
    )
    assert load_model(f"hf:{path}").build().config.n_layer == 1


def test_a_sequence_longer_than_the_model_is_refused() -> None:
    with pytest.raises(InputError, match="longer than the model's 128 positions"):
        load_model("hf:gpt2-tiny").example(2, 500)


@pytest.mark.parametrize("name", KNOWN_CONFIGS)
def test_every_known_name_has_a_config_and_a_batch(name: str) -> None:
    source = load_model(f"hf:{name}")
    assert source.name == name
    batch = source.example(3)
    assert all(tensor.shape[0] == 3 for tensor in batch.values())


def test_every_architecture_has_a_miniature_and_a_usual_size() -> None:
    names: dict[str, list[bool]] = {}
    for name, fields in KNOWN_CONFIGS.items():
        names.setdefault(fields["model_type"], []).append(name.endswith("-tiny"))
    assert len(names) >= 24
    assert all(sum(tiny) == 1 and len(tiny) > 1 for tiny in names.values())


def test_a_config_file_of_each_task_gets_the_batch_of_its_task(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for name, entries in (
        ("whisper-tiny", {"input_features", "labels"}),
        ("clip-tiny", {"input_ids", "pixel_values"}),
        ("wav2vec2-tiny", {"input_values", "labels"}),
        ("segformer-tiny", {"pixel_values", "labels"}),
    ):
        path.write_text(json.dumps(KNOWN_CONFIGS[name]))
        assert set(load_model(f"hf:{path}").example(2)) == entries


def test_a_sound_too_short_for_the_convolutions_is_refused() -> None:
    with pytest.raises(InputError, match="needs at least 400, not 100"):
        load_model("hf:wav2vec2-tiny").example(2, 100)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, '{"a":' + "9" * 100_000 + "}", " " * 5 * 2**20]
)
def test_a_config_that_is_large_or_deep_is_one_message(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(InputError, match="not readable JSON"):
        load_model(f"hf:{path}")


def test_a_file_finds_its_neighbours_and_a_module_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "parts_beside.py").write_text(FILE)
    (tmp_path / "beside" / "net.py").write_text("from parts_beside import pair\n")
    build = "def build():\n    from parts_beside import pair\n    return pair()\n"
    (tmp_path / "beside" / "later.py").write_text(build)
    for spec in ("net.py:pair", "later.py:build"):
        assert load_model(f"{tmp_path}/beside/{spec}").example(3, None)["x"].shape == (3, 4)
    (tmp_path / "packed_nets").mkdir()
    (tmp_path / "packed_nets" / "one.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    assert load_model("packed_nets.one:pair").example(3, None)["x"].shape == (3, 4)


@pytest.mark.parametrize(
    ("factory", "size"), [("pair", 2), ("alone", 16), ("usual", 6), ("open", 10)]
)
def test_without_a_global_batch_the_factorys_own_default_counts(
    file: Path, factory: str, size: int
) -> None:
    assert load_model(f"{file}:{factory}").own_batch_size() == size
    graph = subject.capture(f"{file}:{factory}").graph
    assert {graph.tensors[index].shape[0] for index in graph.inputs} == {size}


GRAPHS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
    def forward(self, x, edges, energy=None):
        count = int(edges.max())  # a value that export cannot know
        h = self.linear(x)
        return (h + torch.zeros_like(h).index_add(0, edges[1], h[edges[0]])).pow(2).mean() + 0 * count

def ring(nodes):
    start = torch.arange(nodes)
    return {"x": torch.ones(nodes, 4), "edges": torch.stack([start, (start + 1) % nodes])}

def one():
    return Net(), ring(30)

def many(batch_size=4):
    return Net(), ring(5 * batch_size)

def huge(batch_size=4, seq=8):
    return Net(), ring(batch_size * seq)

def parts(batch_size=4):
    return Net(), ring(5 * batch_size) | {"energy": torch.ones(batch_size)}
"""


@pytest.mark.parametrize(("factory", "rows"), [("one", 30), ("many", 20)])
def test_rows_that_refer_to_each_other_are_left_as_their_factory_makes_them(
    tmp_path: Path, factory: str, rows: int
) -> None:
    (tmp_path / "graphs.py").write_text(GRAPHS)
    graph = subject.capture(f"{tmp_path}/graphs.py:{factory}").graph
    assert {graph.tensors[index].shape for index in graph.inputs} == {(rows, 4), (2, rows)}


def test_samples_of_several_rows_are_made_as_asked_for(tmp_path: Path) -> None:
    (tmp_path / "graphs.py").write_text(GRAPHS)
    made = load_model(f"{tmp_path}/graphs.py:many").example(40)
    assert made["x"].shape == (40, 4)
    assert int(made["edges"].max()) == 39


def test_a_batch_that_would_cut_samples_whose_rows_refer_to_each_other_is_refused(
    tmp_path: Path,
) -> None:
    (tmp_path / "graphs.py").write_text(GRAPHS)
    with pytest.raises(InputError, match=r"'x', of which .* 5 a sample.* not 8; .*\(-b 40\)"):
        subject.capture(f"{tmp_path}/graphs.py:parts", global_batch=8)


def test_a_batch_that_was_cut_is_named_as_the_cause(tmp_path: Path) -> None:
    (tmp_path / "graphs.py").write_text(GRAPHS)
    with pytest.raises(
        CaptureError, match=r"has 30 rows, and was brought to 8 .* \(at graphs.py:12\); .*-b 30"
    ):
        subject.capture(f"{tmp_path}/graphs.py:one", global_batch=8)


@pytest.mark.parametrize(
    ("model", "batch_size", "seq"),
    [
        ("hf:t5-tiny", 2, 2**31),
        ("hf:wav2vec2-tiny", 2, 2**31),
        ("hf:bert-tiny", 2**31, None),
        ("graphs.py:huge", 4, 2**31),
        ("graphs.py:many", 2**31, None),
        ("graphs.py:one", 2**31, None),
    ],
)
def test_an_example_of_billions_of_numbers_is_refused_before_it_is_made(
    tmp_path: Path, model: str, batch_size: int, seq: int | None
) -> None:
    (tmp_path / "graphs.py").write_text(GRAPHS)
    source = load_model(model if model.startswith("hf:") else f"{tmp_path}/{model}")
    with pytest.raises(InputError, match=r"at most 2\^28 numbers"):
        source.example(batch_size, seq)


BOTH = """
import torch
from torch import nn

def wide(batch_size=2, width=1 << 12):
    model = nn.Linear(width, width)
    return model, {"x": torch.rand(batch_size, width)}

def seen_by_its_model(batch_size=2):
    model = nn.Linear(4, 4)
    return model, {"x": model(torch.ones(batch_size, 4)).detach()}

def tied_to_its_weights(batch_size=2):
    model = nn.Linear(4, 4)
    return model, {"x": model.weight.detach()[:batch_size]}
"""


def test_weights_are_not_drawn_for_the_batch_that_a_model_is_captured_with(tmp_path: Path) -> None:
    (tmp_path / "both.py").write_text(BOTH)
    source = load_model(f"{tmp_path}/both.py:wide")
    torch.manual_seed(3)
    first = torch.rand(2, 1 << 12)
    torch.manual_seed(3)
    assert torch.equal(source.sample(2)["x"], first)
    torch.manual_seed(3)
    assert not torch.equal(
        source.example(2)["x"], first
    )  # what is trained on is what the user's function makes


@pytest.mark.parametrize("factory", ["seen_by_its_model", "tied_to_its_weights"])
def test_a_batch_made_of_weights_has_their_values(tmp_path: Path, factory: str) -> None:
    (tmp_path / "both.py").write_text(BOTH)
    source = load_model(f"{tmp_path}/both.py:{factory}")
    torch.manual_seed(3)
    made = source.sample(2)["x"]
    torch.manual_seed(3)
    assert torch.equal(made, source.example(2)["x"])
    assert made.device.type == "cpu"
