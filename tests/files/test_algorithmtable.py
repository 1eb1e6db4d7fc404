"""Tables of algorithms as they are written, and every way in which they may be wrong."""

from __future__ import annotations

import pytest

from shardwright.errors import InputError
from shardwright.files.advice import read_batch_times, read_step_times
from shardwright.files.algorithmtable import parse_algorithms

TABLE = """
layer,algorithm,seconds_ms,bytes,batch,note
conv,gemm,4,0,64,
conv,fft,2,80000000,64,fast
fc,gemm,1.5,1e6,64,
conv,gemm,2,0,32,
fc,gemm,1,5e5,32,
"""


def test_a_table_is_read_by_batch_with_its_units():
    small, large = parse_algorithms(TABLE)
    assert (small.batch, large.batch) == (32, 64)
    assert [layer.name for layer in large.layers] == ["conv", "fc"]
    fft = large.layers[0].algorithms[1]
    assert (fft.name, fft.seconds, fft.bytes) == ("fft", 2e-3, 80_000_000)


def test_a_table_without_batches_has_one_of_unknown_size():
    (one,) = parse_algorithms("layer,algorithm,seconds,bytes\na,x,1,2\n")
    assert one.batch == 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "lacks the columns"),
        ("layer,seconds,bytes\n", "lacks the columns algorithm"),
        ("layer,algorithm,seconds,bytes\n", "has no algorithms"),
        ("layer,algorithm,seconds,bytes\na,x,-1,2\n", "row 2: seconds must be"),
        ("layer,algorithm,seconds,bytes\na,x,1,nan\n", "row 2: bytes must be"),
        ("layer,algorithm,seconds,bytes\na,,1,2\n", "names a layer and an algorithm"),
        ("layer,algorithm,seconds,bytes\na,x,1,2\na,x,1,3\n", "stands twice"),
        ("layer,algorithm,seconds,bytes,batch\na,x,1,2,0\n", "batch must be"),
        ("layer,algorithm,seconds,bytes,batch\na,x,1,2,8\nb,x,1,2,8\na,x,1,2,16\n", "layer 'b'"),
    ],
)
def test_a_wrong_table_is_refused_with_the_row_and_what_is_accepted(text, says):
    with pytest.raises(InputError, match=says):
        parse_algorithms(text)


def test_measured_steps_are_read_with_their_units():
    assert read_step_times("2:5.4s, 1:10000ms") == ((1, 10.0), (2, 5.4))
    assert read_batch_times("64@2:110ms,32:0.1s") == ((32, 1, 0.1), (64, 2, 0.11))


@pytest.mark.parametrize(
    "text", ["", "1:10s", "1:10s,1:9s", "0:1s,2:1s", "a:1s,2:1s", "1:10,2:5", "1,2"]
)
def test_measured_steps_that_tell_nothing_are_refused(text):
    with pytest.raises(InputError, match="write for example"):
        read_step_times(text)


@pytest.mark.parametrize("text", ["", "32", "32@0:1s", "32@x:1s", "32:1s,32@1:2s", "32:-1s"])
def test_measured_batches_that_tell_nothing_are_refused(text):
    with pytest.raises(InputError, match="write for example"):
        read_batch_times(text)
