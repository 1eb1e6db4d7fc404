"""PipeDream's profile graphs: read, and refused with one clear message."""

import pytest

from shardwright.errors import InputError
from shardwright.files.layergraph import parse_layer_graph, read_layer_graph
from shardwright.files.workers import read_bandwidths, read_levels, read_workers

COSTS = "forward_compute_time=1.5, backward_compute_time=2.500, activation_size={}, parameter_size=64.000"
GOOD = "\n".join(
    [
        "node1 -- Input0 -- " + COSTS.format("0.0"),
        "node2 -- LSTM(8, 8) -- " + COSTS.format("[1024.0; 32.0; 32.0]"),
        "node3 -- __getitem__(0) -- " + COSTS.format("1024.0"),
        "node4 -- __getitem__(1) -- " + COSTS.format("32.0"),
        "node5 -- Linear(in_features=8, out_features=4, bias=True) -- " + COSTS.format("16.0")
        + " -- stage_id=1",
        "\tnode1 -- node2",
        "\tnode2 -- node3",
        "\tnode2 -- node4",
        "\tnode3 -- node5",
        "\tnode3 -- node5",
        "",
    ]
)  # fmt: skip


def test_layers_come_in_seconds_and_bytes_without_inputs_and_unread_items():
    graph = parse_layer_graph(GOOD)
    assert [layer.name for layer in graph.layers] == ["node2", "node3", "node5"]
    first = graph.layers[0]
    assert (first.forward_seconds, first.backward_seconds) == (0.0015, 0.0025)
    assert (first.activation_bytes, first.parameter_bytes) == (1088.0, 64.0)
    assert graph.layers[2].description == "Linear(in_features=8, out_features=4, bias=True)"
    assert graph.edges == ((0, 1), (1, 2))


def test_a_file_is_read_and_a_missing_one_named(tmp_path):
    path = tmp_path / "graph.txt"
    path.write_text(GOOD)
    assert len(read_layer_graph(path).layers) == 3
    with pytest.raises(InputError, match=r"cannot read .*missing\.txt"):
        read_layer_graph(tmp_path / "missing.txt")
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="is text in UTF-8"):
        read_layer_graph(path)


LINE = "a -- A -- " + COSTS.format("1.0")
BAD = {
    "": "has no layers",
    "hello": "line 1: a layer is",
    "a -- A": "line 1: a layer is",
    "a -- A -- forward_compute_time=1.0": "lacks backward_compute_time, activation_size, parameter_size",
    LINE.replace("1.5", "fast"): "forward_compute_time must be a number, not 'fast'",
    LINE.replace("1.5", "nan"): "must be finite and 0 or more",
    LINE.replace("1.5", "-1"): "must be finite and 0 or more",
    LINE.replace("1.5", "inf"): "must be finite",
    LINE.replace("=1.0,", "=[1.0; x],"): "activation_size must be a number, not 'x'",
    LINE + "\n" + LINE: "line 2: layer 'a' appears twice",
    LINE + "\n\ta -- b": "line 2: the edge names layer 'b'",
    LINE + "\n\ta": "line 2: an edge is",
    LINE + "\n\ta -- a": "feeds itself",
    LINE + "\n" + LINE.replace("a --", "b --", 1) + "\n\ta -- b\n\tb -- a": "cycle through a, b",
    LINE.replace("A", "Input0"): "has no layers",
}


@pytest.mark.parametrize("text", BAD)
def test_a_malformed_profile_is_one_clear_message(text):
    with pytest.raises(InputError, match=BAD[text]) as caught:
        parse_layer_graph(text, "graph.txt")
    assert "graph.txt" in str(caught.value)
    assert "; " in str(caught.value)  # a remedy


def test_workers_and_bandwidths_are_read_as_people_write_them():
    assert [kind.count for kind in read_workers("16")] == [16]
    slow = read_workers("8, 4@0.5@2 GiB", memory_bytes=7.0)
    assert [(kind.count, kind.speed, kind.memory_bytes) for kind in slow] == [
        (8, 1.0, 7.0),
        (4, 0.5, 2 * 2.0**30),
    ]
    assert read_levels("2x8") == (2, 8)
    assert read_levels("8,8@0.5") == ()
    assert read_bandwidths("1e9, 10 GB/s") == (1e9, 1e10)


@pytest.mark.parametrize(
    "text", ["", "0", "many", "4@fast", "4@-1", "5000", "1@1@1", "4@1@2GiB@3", "4000,4000"]
)
def test_workers_that_mean_nothing_are_refused(text):
    with pytest.raises(InputError):
        read_workers(text)


@pytest.mark.parametrize("text", ["", "0", "-1e9", "nan", "10 GB", "fast", "1e9,"])
def test_bandwidths_that_mean_nothing_are_refused(text):
    with pytest.raises(InputError, match="bandwidth"):
        read_bandwidths(text)
