"""Traces of layers, networks and tables of messages are read, or refused with the place."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwright.errors import InputError
from shardwright.files.layertrace import MOST_LAYERS, parse_layer_trace
from shardwright.files.networks import read_network, read_points


def test_times_have_the_unit_of_their_column_and_rows_that_are_no_layer_are_told_apart():
    trace = parse_layer_trace(
        "\ufeffname\tforward_us\tbackward_ms\tcomm\tnumel\n".lstrip("\ufeff")
        + "data\t2000\t0\t9\t0\nh2d\t500\t0\t9\t0\nconv\t100\t2\t9\t10\npool\t1\t0.5\t9\t0\nupdate\t7\t0\t9\t0\n"
    )
    assert (trace.fetch_seconds, trace.copy_seconds) == (pytest.approx(2e-3), pytest.approx(5e-4))
    assert trace.update_seconds == pytest.approx(7e-6)
    assert [one.name for one in trace.layers] == ["conv", "pool"]
    assert trace.layers[0].forward_seconds == pytest.approx(1e-4)
    assert trace.layers[0].backward_seconds == pytest.approx(2e-3)
    assert [one.bytes for one in trace.layers] == [40, 0]


def test_parameters_of_one_layer_are_one_layer_and_equal_layers_are_several():
    trace = parse_layer_trace(
        "name,forward,backward,bytes\na.weight,1,2,100\na.bias,1,2,8\nb,1,2,50\nc,1,2,50\n"
    )
    assert [(one.name, one.bytes) for one in trace.layers] == [
        ("a.weight", 108),
        ("b", 50),
        ("c", 50),
    ]
    alike = "conv,1,2,50\nconv,1,2,50\nd.weight,1,2,50\nd.weight,1,2,50\nd,1,2,50\n.weight,1,2,5\n.bias,1,2,5\n"
    assert len(parse_layer_trace("name,forward,backward,bytes\n" + alike).layers) == 7
    unnamed = parse_layer_trace("forward,backward,bytes\n1,2,3\n1,2,3\n")
    assert len(unnamed.layers) == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "lacks the columns"),
        ("name,forward,bytes\na,1,2\n", "lacks the columns backward"),
        ("name,forward,backward,bytes\n", "has no layers"),
        ("name,forward,backward,bytes\na,1,x,3\n", "row 2: backward must be a number"),
        ("name,forward,backward,bytes\na,1,nan,3\n", "row 2: backward must be a number"),
        ("name,forward,backward,bytes\na,-1,1,3\n", "row 2: forward must be a number"),
        ("name,forward,backward,bytes\na,1,1,1e300\n", "row 2: bytes must be a number"),
        ("name,forward,backward,bytes\na,1\n", "row 2: backward must be a number"),
        ("name,forward,backward,bytes\ndata,1,1,3\n", "is no layer"),
        (
            "name,forward,backward,bytes\na,1,1,1,024\n",
            "row 2: it has 5 cells, but there are 4 columns",
        ),
        (
            "\nname,forward,backward,bytes\n\na,1,1,3\n , ,,\nb,x,1,3\n",
            "row 6: forward must be a number",
        ),
        ("forward,backward,bytes\n" + "1,1,1\n" * MOST_LAYERS, "at most"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_row(text: str, words: str):
    with pytest.raises(InputError, match=words):
        parse_layer_trace(text)


def test_rows_that_say_nothing_are_left_out():
    trace = parse_layer_trace("\nname,forward,backward,bytes\n\na,1,2,3,\n,,,\nb,1,2,3\n\n")
    assert [one.name for one in trace.layers] == ["a", "b"]


def test_networks_are_read_as_people_name_them():
    assert read_network("10GbE") == (pytest.approx(30e-6), pytest.approx(1.125e9), 0.0)
    assert read_network("100GbIB") == (pytest.approx(5e-6), pytest.approx(11.25e9), 0.0)
    assert read_network("8 Gbit/s") == (pytest.approx(30e-6), pytest.approx(1e9), 0.0)
    found = read_network("8 Gbit/s, 45 us, 2.5 ns")
    assert found == (pytest.approx(45e-6), pytest.approx(1e9), pytest.approx(2.5e-9))
    for wrong in ("", "10", "0GbE", "fast", "8 Gbit/s, 1", "1 GB/s,1 s,1 s,1 s", "-1 GB/s"):
        with pytest.raises(InputError, match="is no network"):
            read_network(wrong)


def test_tables_of_messages_are_read_or_refused(tmp_path: Path):
    file = tmp_path / "messages.csv"
    file.write_text("bytes,seconds\n2048,0.2\n\n,\n1024,0.1\n")
    assert read_points(file) == ((1024.0, 0.1), (2048.0, 0.2))
    for text in (
        "1,2\n",
        "bytes,seconds\n1,1\n",
        "bytes,seconds\n1,1\n1,2\n",
        "bytes,seconds\n1,x\n2,2\n",
        "bytes,seconds\n1,024,0.1\n2,048,0.2\n",
    ):
        file.write_text(text)
        with pytest.raises(InputError, match=r"messages\.csv"):
            read_points(file)
