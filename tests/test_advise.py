"""``shardwright advise``: good answers with what they rest on, bad input in one line."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from torch import nn

from shardwright.errors import ShardwrightError
from shardwright.runtime.capture import load_model
from shardwright.runtime.capture.source import ModelSource
from shardwright.runtime.fit import step_bytes
from shardwright.runtime.settings import possible_settings
from shardwright.runtime.train import build_seeded
from shardwright.verbs.advice.batch import advise_batch
from shardwright.verbs.advice.microbatch import MOST_TRIED, Size, largest
from shardwright.verbs.advice.requests import BatchRequest, SettingsRequest
from shardwright.verbs.advice.settings import advise_settings
from tests.command import MODEL, shardwright
from tests.docs.pages import ROOT

TABLE = """layer,algorithm,seconds,bytes,batch
conv,gemm,4,0,32
conv,fft,2,800,32
fc,gemm,1,0,32
conv,gemm,8,0,64
conv,fft,3,1600,64
fc,gemm,2,0,64
"""
DEVICES = ("devices", "--measured", "1:10s,2:5.4s")
SERVERS = (
    "servers",
    "--parameters",
    "244 MB",
    "--workers",
    "8",
    "--bandwidth",
    "10 Gbit/s",
    "--compute",
    "1 s",
)
BATCH = ("batch", "--noise-scale", "1000", "--measured", "100:1s,1000:4s,1000@8:0.6s")
CACHES = (
    "caches", "--dataset", "1 GB", "--samples", "1000", "--memory", "250 MB", "--storage", "10 MB/s",
    "--compute", "100",
)  # fmt: skip
pytestmark = pytest.mark.usefixtures("short_climbs")
ALGORITHMS = ("algorithms", "table.csv", "--memory", "2 kB")


def advised(folder: Path, *words: str):
    (folder / "table.csv").write_text(TABLE)
    done = shardwright("advise", *words, "--json", folder=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "words", [DEVICES, SERVERS, BATCH, CACHES, ALGORITHMS], ids=lambda words: words[0]
)
def test_every_answer_names_what_it_rests_on_as_text_json_and_page(words, tmp_path):
    found = advised(tmp_path, *words, "--html", "page.html")
    told = shardwright("advise", *words, folder=tmp_path).stdout
    page = (tmp_path / "page.html").read_text()
    for line in (*found["answers"], *found["assumptions"], *found["sources"]):
        words_of_line = line.split()
        assert all(word in told for word in words_of_line)
        assert all(word in page for word in words_of_line if word.isalnum())
    assert found["inputs"]
    assert all(curve["lines"] for curve in found["curves"])
    assert "plotly" in page


def test_the_guides_commands_and_code_run(tmp_path):
    page = (ROOT / "docs" / "guides" / "advise.md").read_text()
    table = re.search(r"```text\n(layer,algorithm.*?)```", page, re.DOTALL)
    assert table
    (tmp_path / "table.csv").write_text(table[1])
    asked = r"^shardwright (advise (?:devices|servers|batch|caches|algorithms) .*)$"
    lines = re.findall(asked, page, re.MULTILINE)
    assert len(lines) == 11
    for line in lines:
        done = shardwright(*shlex.split(line), folder=tmp_path)
        assert done.returncode == 0, done.stderr
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(code, {})
    assert re.fullmatch(r"\d+ samples\n", said.getvalue())


def test_devices_follow_from_two_measured_steps(tmp_path):
    found = advised(tmp_path, *DEVICES)
    assert found["devices"] == 4
    assert found["ratio"] == pytest.approx(0.8 / 9.2)
    assert advised(tmp_path, *DEVICES, "--efficiency", "0.9")["devices"] == 2


def test_an_all_reduce_that_grows_leaves_fewer_devices(tmp_path):
    """By the formula of a ring: 2 (G - 1) / G x S / B, latency apart."""
    steps = [(2, 8 / 2 + 0.5), (4, 8 / 4 + 0.75)]  # half a second of S / B
    text = ",".join(f"{devices}:{seconds}s" for devices, seconds in steps)
    found = advised(
        tmp_path, "devices", "--measured", text, "--gradients", "500 MB", "--link", "8 Gbit/s, 1 ns",
        "--efficiency", "0.7",
    )  # fmt: skip
    assert found["compute_seconds"] == pytest.approx(8, rel=1e-6)
    assert found["overhead_seconds"] == pytest.approx(0, abs=1e-6)

    def efficiency(devices):
        return 8 / devices / (8 / devices + 2 * (devices - 1) / devices * 0.5)

    assert found["devices"] == max(g for g in range(1, 99) if efficiency(g) >= 0.7)


def test_servers_are_told_for_both_ways_of_a_link(tmp_path):
    found = advised(tmp_path, *SERVERS)
    assert (found["servers"], found["servers_half_duplex"], found["servers_full_duplex"]) == (
        2,
        4,
        2,
    )
    assert found["all_reduce_is_hidden"]
    slow = advised(tmp_path, *SERVERS, "--worker-bandwidth", "1 Gbit/s", "--largest", "200 MB")
    assert "no number of servers" in slow["answers"][1]
    assert "split it" in slow["answers"][2]
    assert not slow["all_reduce_is_hidden"]


def test_a_batch_is_weighed_by_time_and_money(tmp_path):
    found = advised(tmp_path, *BATCH, "--least-steps", "100", "--price", "3600 USD/h")
    rows = {(one["batch"], one["devices"]): one for one in found["options"]}
    assert rows[100, 1]["seconds"] == pytest.approx(100 * (1 + 10) * 1)
    assert rows[1000, 8]["dollars"] == pytest.approx(8 * 100 * 2 * 0.6)
    assert [one["is_beaten"] for one in found["options"]] == [True, False, False]


def test_caches_are_weighed_by_what_they_leave_to_read(tmp_path):
    """Samples of 1 MB; a quarter of them is in the memory of a host, from which none need be fetched."""
    found = advised(tmp_path, *CACHES)
    page, kept = found["ways"]
    assert found["best"] == kept["name"] == "a cache that never evicts"
    assert kept["samples_per_second"] == pytest.approx(10 / 0.75)
    assert kept["epoch_seconds"] == pytest.approx(75)
    assert kept["gain"] == pytest.approx(page["storage"] / 0.75)
    assert found["least_memory_bytes"] == pytest.approx(0.9e9)  # 10 / (1 - 0.9) are 100 a second
    assert advised(tmp_path, *CACHES, "--page-cache-hits", "0.24")["best"] == "the page cache"
    more = advised(tmp_path, *CACHES, "--hosts", "4", "--network", "100 MB/s")
    assert more["best"] == "caches of all hosts as one"
    assert more["ways"][2]["storage"] == 0
    assert more["ways"][2]["samples_per_second"] == 100
    jobs = advised(tmp_path, *CACHES, "--jobs", "5", "--prepare", "200", "--storage", "10 GB/s")
    assert [one["samples_per_second"] for one in jobs["ways"]] == pytest.approx([40, 40, 100])


@pytest.mark.parametrize(("memory", "says"), [("2 GB", "-"), ("0.9 GB", "would wait for no data")])
def test_caches_of_what_nothing_limits_say_so_in_words(memory, says, tmp_path):
    words = ("--dataset", "1 GB", "--samples", "1000", "--memory", memory, "--storage", "10 MB/s")
    done = shardwright("advise", "caches", *words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert says in done.stdout
    assert not re.search(r"\b(inf|nan)", done.stdout)


@pytest.mark.parametrize(("optimizer", "rate"), [("adamw", 0.01 * 2), ("sgd", 0.01 * 4)])
def test_the_learning_rate_follows_the_rule_of_the_optimizer(optimizer, rate, tmp_path):
    found = advised(
        tmp_path, "batch", "--noise-scale", "1e6", "--measured", "64:1s", "--lr", "0.01",
        "--tuned-at", "16", "--optimizer", optimizer,
    )  # fmt: skip
    assert found["options"][0]["learning_rate"] == pytest.approx(rate)


def test_a_better_batch_between_measured_ones_is_to_be_measured():
    """Steps of 1 + B / 4 ms, noise of 16: brute force over whole batches."""

    def asked(measured):
        return advise_batch(BatchRequest(noise_scale=16.0, measured=measured))

    found = asked("4:2ms,16:5ms,64:17ms")
    times = {batch: (1 + 16 / batch) * (1 + batch / 4) for batch in range(4, 65)}
    best = min(times, key=lambda batch: times[batch])
    assert found.values["between"]["batch"] == best == 8
    assert found.values["between"]["seconds"] == pytest.approx(times[best] * 1e-3)
    (said,) = [answer for answer in found.answers if answer.startswith("Measure")]
    assert "a batch of 8 on 1 device(s) too" in said
    assert f"{1 - times[8] / min(times[4], times[16]):.0%} less" in said
    # Nothing to gain: it was measured, or lies between unlike numbers of devices.
    for measured in ("4:2ms,8:3ms,16:5ms,64:17ms", "4@1:2ms,16@2:5ms", "4:2ms", "16:2ms,64:1ms"):
        assert asked(measured).values["between"] is None


def test_a_batch_is_chosen_with_its_algorithms(tmp_path):
    found = advised(tmp_path, *ALGORITHMS)
    assert (found["batch"], found["algorithms"]) == (64, {"conv": "fft", "fc": "gemm"})
    tight = advised(tmp_path, *ALGORITHMS, "--per-sample", "16 B")
    assert (tight["batch"], tight["algorithms"]["conv"]) == (32, "fft")
    assert advised(tmp_path, *ALGORITHMS, "--tolerance", "0.2")["batch"] == 32


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((*ALGORITHMS[:3], "10 B", "--per-sample", "1 B"), "the smallest needs 32 bytes"),
        (("algorithms", "nothing.csv", "--memory", "1 GiB"), "cannot read"),
        (("algorithms", "table.csv"), "--memory needs"),
        (("algorithms", "table.csv", "--memory", "1 GiB", "--workspace", "both"), "one of sum, max"),
        (("devices",), "at least two"),
        (("devices", "--measured", "1:10s"), "two numbers"),
        (("devices", "--measured", "1:10s,2:5s", "--link", "10GbE"), "--gradients and --link"),
        (("devices", "--measured", "1:10s,2:5s", "--efficiency", "1.5"), "efficiency must be"),
        (("devices", "--measured", "1:10s,2:5s", "--cluster", "2xH100"), "give --model"),
        (("servers", "--parameters", "1 GB"), "need --bandwidth"),
        ((*SERVERS[:-1], "1"), "has no unit"),
        (("caches", "--dataset", "1 GB"), "needs --samples"),
        ((*CACHES, "--hosts", "2"), "give --network"),
        ((*CACHES, "--hosts", "2", "--jobs", "2"), "not both"),
        ((*CACHES, "--prepare", "5e-324", "--jobs", "4"), "--prepare is 4.94066e-324"),
        (("batch",), "give --noise-scale"),
        (("batch", "--noise-scale", "inf"), "number of samples"),
        (("batch", "--noise-scale", "10", "--lr", "0.1"), "--tuned-at"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_in_one_line(words, says, tmp_path):
    (tmp_path / "table.csv").write_text(TABLE)
    done = shardwright("advise", *words, folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("power", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("bound", [99, 100.0, 150, 1234.5, 70_000])
def test_the_largest_batch_is_found_on_any_rising_curve(power, bound):
    asked: list[int] = []

    def size(batch):
        asked.append(batch)
        return Size(batch, 99 + (batch - 1) ** power, 1.0)

    tried = largest(size, bound, 2000)
    best = max(one.batch for one in tried if one.bytes <= bound)
    assert best == max(k for k in range(1, 2001) if 99 + (k - 1) ** power <= bound)
    assert len(asked) <= MOST_TRIED


@pytest.mark.torch
def test_a_device_takes_as_many_samples_as_its_memory_lets(tmp_path):
    (tmp_path / "net.py").write_text(MODEL)
    words = ("microbatch", "net.py:build", "-c", "1xH100", "--precision", "float32")
    found = advised(tmp_path, *words, "--memory", "1 MiB", "--search")
    tried = {batch: size for batch, size, _ in found["tried"]}
    assert tried[found["batch"]] <= 2**20 < tried[found["batch"] + 1]
    # What autograd keeps of a sample: x, both sides of relu at most, and the logits, in float32.
    least, most = 4 * (16 + 32 + 8), 4 * (2 * 16 + 3 * 32 + 3 * 8)
    parameters = 4 * 4 * (16 * 32 + 32 + 32 * 8 + 8)
    assert (2**20 - 2 * parameters) / most < found["batch"] < 2**20 / least
    ran = dict(found["searched"])
    assert ran[found["searched_batch"]] <= 2**20 < ran[found["searched_batch"] + 1]
    assert (2**20 - 4 * parameters) / most < found["searched_batch"] < 2**20 / least
    refused = shardwright("advise", *words, "--memory", "1 kB", folder=tmp_path)
    assert refused.returncode == 2
    assert "not even one sample" in refused.stderr


class Square(nn.Module):
    def __init__(self):
        super().__init__()
        self.maps = nn.Linear(700, 700, bias=False)

    def forward(self, x):
        return self.maps(x).sum()


@pytest.mark.torch
@pytest.mark.parametrize(("optimizer", "kept"), [("sgd", 2), ("momentum", 3)])
def test_a_step_that_ran_took_what_its_tensors_take(optimizer, kept):
    """A weight, its gradient and its momentum; of each sample an input and an output."""
    source = ModelSource("square", Square, lambda batch, seq: {"x": torch.ones(batch, 700)})
    one, more = (step_bytes(source, batch, optimizer=optimizer) for batch in (1, 401))
    assert one == pytest.approx(kept * 4 * 700**2, rel=0.01)
    # Backward makes the output's gradient while the output is gone: the sum is all that is left of it.
    assert 400 * 4 * 700 <= more - one <= 400 * 3 * 4 * 700


ATTENTION = """
import torch
from torch import nn
import torch.nn.functional as F

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.maps = nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = (one.unflatten(-1, (2, 8)).transpose(1, 2) for one in self.maps(x).chunk(3, -1))
        return x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.eyes, self.blocks = nn.Conv2d(3, 16, 2, 2), nn.ModuleList([Block(), Block()])

    def forward(self, x):
        x = self.eyes(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

def build():
    return Net()

def example_batch(batch_size=2):
    return {"x": torch.ones(batch_size, 3, 8, 8)}
"""


@pytest.mark.torch
def test_the_simulator_stands_beside_what_was_measured(tmp_path):
    """Its steps are those of the plans that `plan --mode curve` finds."""
    (tmp_path / "net.py").write_text(MODEL)
    where = ("-c", "1x2xH100", "-b", "65536")
    planned = shardwright(
        "plan", "net.py:build", *where, "--mode", "curve", "--json", folder=tmp_path
    )
    points = {one["devices"]: one["step_seconds"] for one in json.loads(planned.stdout)["curve"]}
    found = advised(tmp_path, *DEVICES, "--model", "net.py:build", *where)
    assert found["devices"] == 4  # of what was measured
    assert dict(found["simulated"]) == pytest.approx(points)
    least = min(points)
    efficient = [k for k, t in points.items() if least * points[least] / (k * t) >= 0.8]
    assert found["simulated_devices"] == max(efficient)
    alone = advised(tmp_path, "devices", "--model", "net.py:build", *where)
    assert not alone["measured"]
    assert alone["compute_seconds"] > 0


@pytest.mark.torch
def test_every_setting_that_a_model_has_a_use_for_is_measured_or_refused(tmp_path):
    (tmp_path / "net.py").write_text(ATTENTION)
    found = advised(tmp_path, "settings", "net.py:build", "--turns", "2")
    names = {one["name"] for one in found["settings"]} | set(found["refused"])
    attention = {"attention: flash", "attention: memory-efficient", "attention: math"}
    assert names == {"plain", "channels-last", "recomputation"} | attention
    assert {"plain", "attention: math"} <= {one["name"] for one in found["settings"]}
    assert all(one["seconds"] > 0 <= one["spread_seconds"] for one in found["settings"])
    (tmp_path / "other.py").write_text(MODEL)
    found = advised(tmp_path, "settings", "other.py:build", "--turns", "1", "-b", "4")
    assert [one["name"] for one in found["settings"]] == ["plain"]


UNFIT = """
import torch
from torch import nn

def build():
    return nn.Linear(3, 2)

class Narrow(nn.Linear):
    def forward(self, input):
        return super().forward(input[:, :2]).sum()

def narrow():
    return Narrow(3, 2)

def example_batch(batch_size=4):
    return {"input": torch.ones(batch_size, 3)}
"""


@pytest.mark.torch
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("build", r"must return its loss as a scalar, .* returned \(4, 2\)"),
        ("narrow", r"net.py:narrow raised RuntimeError: mat1 .* \(at net.py:10\); see that"),
    ],
)
def test_a_model_whose_step_does_not_run_is_told_in_one_line(tmp_path, name, says):
    (tmp_path / "net.py").write_text(UNFIT)
    with pytest.raises(ShardwrightError, match=says):
        advise_settings(f"{tmp_path}/net.py:{name}", SettingsRequest(turns=1))


@pytest.mark.torch
def test_settings_compute_the_plain_loss_and_leave_the_weights_as_they_are(tmp_path):
    (tmp_path / "net.py").write_text(ATTENTION)
    source = load_model(f"{tmp_path}/net.py:build")
    module, batch = build_seeded(source).train(), source.example(2)
    before = [p.detach().clone() for p in module.parameters()]
    losses = {}
    for setting in possible_settings(module, batch, compiles=False):
        with contextlib.suppress(RuntimeError):
            losses[setting.name] = setting.step(batch)
    assert {"plain", "recomputation", "channels-last", "attention: math"} <= losses.keys()
    for loss in losses.values():
        torch.testing.assert_close(loss, losses["plain"])
    for one, other in zip(module.parameters(), before, strict=True):
        assert one.equal(other)
        assert one.grad is None
