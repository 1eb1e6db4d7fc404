"""The clusters that published runs name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwright.errors import InputError
from shardwright.files.rungpus import cluster_of_run
from shardwright.files.runs import PublishedRun

RUN = PublishedRun(
    row=2, id="a", source_id="s", model="M", layers=2, hidden=64, heads=4, seq=128, gpu="H100",
    gpus=16, gpus_per_node=8, intra_bw_gbs=450, inter_bw_gbps_node=3200,
)  # fmt: skip


@pytest.mark.parametrize(
    ("gpu", "memory", "kind"),
    [
        ("A100-80", 80, "A100-SXM4-80GB"),
        ("A100-40", 40, "A100-SXM4-40GB"),
        ("A100", 40, "A100-SXM4-40GB"),
        ("A100-80GB", None, "A100-SXM4-80GB"),
        ("A100-PCIe-80GB", 80, "A100-PCIe-80GB"),
        ("V100-16", 16, "V100-SXM2-16GB"),
        ("V100-32", 32, "V100-SXM2-32GB"),
        ("H100", None, "H100-SXM5-80GB"),
        ("H100-80GB", 80, "H100-SXM5-80GB"),
        ("H100-96", 96, "H100-SXM-96GB-HBM2e-500W"),
        ("H200", 141, "H200-SXM"),
        ("B200", 180, "B200-SXM"),
        ("GB200", 186, "GB200-SXM"),
        ("MI300X", 192, "MI300X"),
        ("NVIDIA H100 80GB HBM3", 80, "H100-SXM5-80GB"),
        ("Tesla V100-SXM2-32GB", 32, "V100-SXM2-32GB"),
        ("NVIDIA A100-SXM4-80GB", None, "A100-SXM4-80GB"),
        ("A100 40GB", None, "A100-SXM4-40GB"),
        ("A800", 80, "A800-SXM4-80GB"),
        ("RTX A6000", 48, "RTX-A6000"),
        ("A6000", None, "RTX-A6000"),
        ("GeForce RTX 4090", 24, "RTX-4090"),
        ("H20", 96, "H20-SXM"),
        ("GH200", 96, "GH200-96GB"),
        ("H800", 80, "H800-SXM"),
        ("L40S", 48, "L40S"),
    ],
)
def test_a_name_and_a_memory_mean_a_published_kind(
    gpu: str, memory: float | None, kind: str
) -> None:
    cluster, _ = cluster_of_run(replace(RUN, gpu=gpu, gpu_mem_gb=memory))
    assert cluster.kinds[0].name == kind


def test_links_are_those_that_the_row_prints() -> None:
    cluster, assumed = cluster_of_run(RUN)
    assert cluster.num_devices == 16
    assert {device.link.bandwidth for device in cluster.devices} == {450e9}
    uplinks = [switch.link.bandwidth for switch in cluster.switches if switch.link]
    assert uplinks == [400e9] * 2  # 3200 Gbit/s
    assert assumed == ()


def test_what_is_not_printed_is_assumed_and_said() -> None:
    cluster, assumed = cluster_of_run(
        replace(RUN, gpus_per_node=None, intra_bw_gbs=None, inter_bw_gbps_node=None)
    )
    assert assumed == ("8 devices per host", "network of DGX H100")
    assert len({device.host for device in cluster.devices}) == 2


def test_a_last_host_may_be_partly_used() -> None:
    cluster, _ = cluster_of_run(replace(RUN, gpus=12))
    hosts = [device.host for device in cluster.devices]
    assert sorted(map(hosts.count, set(hosts))) == [4, 8]


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(InputError, match="no published rates of Abacus"):
        cluster_of_run(replace(RUN, gpu="Abacus"))
