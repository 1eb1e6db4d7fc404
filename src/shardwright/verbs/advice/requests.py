"""What advice is asked on: the options of ``advise``'s commands, checked once; quantities are text with units."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import get_args

from shardwright.core.algorithms import Workspace
from shardwright.core.caches import MOST_HOSTS, CachedInput
from shardwright.errors import InputError
from shardwright.files.units import Quantity, read_quantity
from shardwright.verbs.options import check_options, option
from shardwright.verbs.request import OPTIMIZER_STATES

PAPER = "Zou et al., Distributed Training Large-Scale Deep Architectures (arXiv 1709.06622)"
LARGEST_BATCH = 2**31
LEAST_RATE = 1e-9  # samples/s: what is less becomes nothing where jobs share it


def _read(text: str, name: str, quantity: Quantity, *, zero: bool = False) -> float:
    """Return a quantity, 0 where nothing was said and that is allowed."""
    if not text and zero:
        return 0.0
    try:
        return read_quantity(text, quantity, zero=zero)
    except InputError as error:
        raise InputError(f"{name} {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmRequest:
    """Within how much ``memory`` algorithms are chosen. Of it ``fixed`` is taken by parameters and their like, and
    ``per_sample`` by the activations of each sample of the batch."""

    memory: str = option("", "Of a device, such as '12 GiB'.")
    fixed: str = option("", "Taken by parameters and optimizer, whatever the batch.")
    per_sample: str = option("", "Taken by the activations of one sample.")
    workspace: str = option(
        "sum", "sum (all layers' at once) or max (free after use).", one_of=get_args(Workspace)
    )
    tolerance: float = option(
        0.05, "Samples per second that a smaller batch may cost, as a share.", least=0.0, most=1.0
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.memory_bytes <= 0 or self.fixed_bytes < 0 or self.sample_bytes < 0:
            raise InputError("memory is more than 0; give for example --memory '12 GiB'")

    @property
    def mode(self) -> Workspace:
        """How workspaces count."""
        return "max" if self.workspace == "max" else "sum"

    @property
    def memory_bytes(self) -> float:
        """Of a device."""
        return _read(self.memory, "--memory", "bytes")

    @property
    def fixed_bytes(self) -> float:
        """Taken whatever the batch."""
        return _read(self.fixed, "--fixed", "bytes", zero=True)

    @property
    def sample_bytes(self) -> float:
        """Taken by each sample."""
        return _read(self.per_sample, "--per-sample", "bytes", zero=True)

    def taken_bytes(self, batch: int) -> float:
        """Return what is taken before workspaces."""
        return self.fixed_bytes + self.sample_bytes * batch

    def workspace_bytes(self, batch: int) -> float:
        """Return what is left for workspaces, below 0 where the batch itself does not fit."""
        return self.memory_bytes - self.taken_bytes(batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRequest:
    """``measured`` steps by devices (``1:10s,2:5.4s``), the ``efficiency`` that is wanted, and where known the bytes of
    ``gradients`` and the ``link`` that they are all-reduced over."""

    measured: str = option("", "Steps by devices, same global batch: 1:10s,2:5.4s.")
    efficiency: float = option(
        0.8, "Speed-up over devices that is wanted at least.", least=0.01, most=0.999
    )
    gradients: str = option("", "Bytes of all gradients, such as '244 MB', with --link.")
    link: str = option("", "10GbE, 100GbIB, or '10 Gbit/s, 45 us'.")

    def __post_init__(self) -> None:
        check_options(self)
        if bool(self.gradients) != bool(self.link):
            raise InputError(
                "what an all-reduce takes follows from bytes and a network; give --gradients and --link, "
                "or neither"
            )

    @property
    def gradient_bytes(self) -> float:
        """Of all gradients."""
        return _read(self.gradients, "--gradients", "bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRequest:
    """What synchronous training exchanges in every step, and over what."""

    parameters: str = option("", "Bytes of all parameters, such as '244 MB'.")
    workers: int = option(1, "How many compute.", least=1, most=2**20)
    bandwidth: str = option("", "Of a server's link, such as '10 Gbit/s'.")
    compute: str = option("", "Computation of a step, such as '1 s'.")
    worker_bandwidth: str = option("", "Of a worker's link; a server's, if not given.")
    largest: str = option("", "Bytes of the largest tensor, where tensors are not split.")
    duplex: str = option("full", "full (both directions at once) or half.", one_of=("full", "half"))

    def __post_init__(self) -> None:
        check_options(self)
        for name in ("parameters", "bandwidth", "compute"):
            if not getattr(self, name):
                raise InputError(
                    f"parameter servers need --{name}; write for example --parameters '244 MB' --workers 8 "
                    "--bandwidth '10 Gbit/s' --compute '1 s'"
                )
        _ = (self.parameter_bytes, self.largest_bytes, self.server_rate, self.worker_rate)
        _ = self.compute_seconds

    @property
    def parameter_bytes(self) -> float:
        """In one direction."""
        return _read(self.parameters, "--parameters", "bytes")

    @property
    def largest_bytes(self) -> float:
        """Of the largest tensor, 0 where tensors are split."""
        return _read(self.largest, "--largest", "bytes", zero=True)

    @property
    def server_rate(self) -> float:
        """Bytes per second of a server's link."""
        return _read(self.bandwidth, "--bandwidth", "bandwidth")

    @property
    def worker_rate(self) -> float:
        """Bytes per second of a worker's link."""
        return _read(self.worker_bandwidth or self.bandwidth, "--worker-bandwidth", "bandwidth")

    @property
    def compute_seconds(self) -> float:
        """Of one step."""
        return _read(self.compute, "--compute", "seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRequest:
    """A data set and what a host has for it; ``compute`` and ``prepare`` as `stalls` measures them (of all a host's
    ranks together), 0 where they are no limit."""

    dataset: str = option("", "Bytes of all samples as they are stored, such as '146 GB'.")
    samples: int | None = option(None, "How many.", least=1, most=2**50)
    memory: str = option("", "Of a host, for the cache, such as '400 GB'.")
    storage: str = option("", "Reading of a host in random order, such as '530 MB/s'.")
    compute: float = option(
        0.0, "Samples/s that a job's devices on a host take (G).", least=0.0, most=1e15
    )
    prepare: float = option(
        0.0, "Samples/s that all of a host's cores prepare (P).", least=0.0, most=1e15
    )
    hosts: int = option(1, "That one job trains on.", least=1, most=MOST_HOSTS)
    network: str = option("", "Of a host, in each direction, such as '40 Gbit/s'.")
    jobs: int = option(1, "That train on one host, each for itself.", least=1, most=64)
    page_cache_hits: float | None = option(
        None, "Share, where measured; a closed form, if not given.", least=0.0, most=1.0
    )

    def __post_init__(self) -> None:
        check_options(self)
        for name in ("dataset", "samples", "memory", "storage"):
            if not getattr(self, name):
                raise InputError(
                    f"what a cache gains needs --{name}; write for example --dataset '146 GB' --samples 1281167 "
                    "--memory '51 GB' --storage '530 MB/s' --compute 5000"
                )
        if self.hosts > 1 and self.jobs > 1:
            raise InputError(
                f"one job trains on several hosts, or several jobs on one; give --hosts {self.hosts} or "
                f"--jobs {self.jobs}, not both"
            )
        if self.hosts > 1 and not self.network:
            raise InputError(
                "caches of several hosts are read over a network; give --network, such as '10 Gbit/s'"
            )
        for name, rate in (("compute", self.compute), ("prepare", self.prepare)):
            if 0 < rate < LEAST_RATE:
                raise InputError(
                    f"a host's samples/s are 0 where they are no limit, else at least {LEAST_RATE:g}, but "
                    f"--{name} is {rate:g}; take it from `shardwright stalls`"
                )
        self.input()

    def input(self) -> CachedInput:
        """Return it in SI units."""
        return CachedInput(
            dataset_bytes=_read(self.dataset, "--dataset", "bytes"),
            samples=self.samples or 0,
            memory=_read(self.memory, "--memory", "bytes", zero=True),
            storage=_read(self.storage, "--storage", "bandwidth"),
            compute=self.compute or math.inf,
            prepare=self.prepare or math.inf,
            network=_read(self.network, "--network", "bandwidth") if self.network else math.inf,
            hosts=self.hosts,
            jobs=self.jobs,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchRequest:
    """What is trained, and within how much ``memory`` of a device (the cluster's own, if not given)."""

    memory: str = option("", "Of a device; the cluster's own, if not given.")
    seq: int | None = option(
        None, "Tokens per sample, where that applies.", "-s", least=1, most=2**31
    )
    optimizer: str = option(
        "adamw", "adamw, adam, sgd, or momentum.", one_of=tuple(OPTIMIZER_STATES)
    )
    precision: str = option("auto", "As `plan` takes it: auto, float32, bfloat16 ...")
    recompute: bool = option(False, "Make every repeated block again in backward.")
    most: int = option(2**20, "Samples to look at at most.", least=1, most=2**31)
    search: bool = option(False, "Also run steps on this machine, until one no longer fits.")

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsRequest:
    """How settings are measured: at which batch, in how many turns, for how long at most."""

    batch: int | None = option(
        None, "Samples; the model's own, if not given.", "-b", least=1, most=LARGEST_BATCH
    )
    seq: int | None = option(
        None, "Tokens per sample, where that applies.", "-s", least=1, most=2**31
    )
    turns: int = option(10, "Of every setting.", least=1, most=1000)
    seconds: float = option(60.0, "After which no further turn is begun.", least=0.1, most=1e5)
    compile: bool = option(False, "Also torch.compile, which takes a while.")

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    """The ``noise_scale`` in samples, ``measured`` steps by batch and devices (``32:0.1s,64@2:0.11s``), and what is known
    of the training: ``least_steps`` with a batch without end, the price of a device, and the ``learning_rate`` that was good
    at the batch ``tuned_at``."""

    noise_scale: float | None = option(
        None,
        "In samples, as `run --noise-scale` tells it.",
        least=1e-6,
        most=1e15,
        says="a noise scale is a number of samples above 0, not {value}; take it from `run --noise-scale`",
    )
    measured: str = option("", "Steps by global batch and devices: 32:0.1s,64@2:0.11s.")
    least_steps: float = option(
        1.0, "Steps to the target with a batch without end; times are relative to it.", least=1.0,
        most=1e12,
    )  # fmt: skip
    price: str = option("", "Of a device, such as '2 USD/h'.")
    optimizer: str = option("adamw", "adamw, adam, sgd, or momentum.",
                            one_of=tuple(OPTIMIZER_STATES))  # fmt: skip
    learning_rate: float = option(
        0.0, "Good at the batch --tuned-at.", "--learning-rate", "--lr", least=0.0, most=1e6
    )
    tuned_at: int = option(0, "The batch of --learning-rate.", least=0, most=LARGEST_BATCH)

    def __post_init__(self) -> None:
        check_options(self)
        if self.noise_scale is None:
            raise InputError(
                "a batch is weighed by the noise of its gradients; give --noise-scale, which `run "
                "--noise-scale` measures"
            )
        if bool(self.learning_rate) != bool(self.tuned_at):
            raise InputError(
                "a learning rate is scaled from the batch it was good at; give --learning-rate and "
                "--tuned-at, or neither"
            )

    @property
    def noise(self) -> float:
        """In samples."""
        return self.noise_scale or 0.0

    @property
    def dollars_per_second(self) -> float:
        """Of one device, 0 where nothing was said."""
        return _read(self.price, "--price", "price", zero=True)
