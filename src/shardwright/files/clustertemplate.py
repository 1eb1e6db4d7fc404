"""The cluster file that ``shardwright init`` writes to be edited."""

TEMPLATE = """\
# A cluster for Shardwright: facts about hosts, devices and links.
# Every quantity has a unit in quotes. GB is 10^9 bytes, GiB is 2^30; Gbit/s is an eighth of GB/s.
# Bandwidths are one direction of a full-duplex link.
name = "my-cluster"

# By how much computation and communication stretch while both run on one device (1 = not at all).
# overlap_slowdown = 1.1
# Which kernels GPUs run: "eager" (PyTorch as it is), "compiled" (torch.compile), "megatron" (fused
# kernels of Megatron-LM), "internevo" (the same, every parameter sent by itself), "compiled-async" and "megatron-core" (tensor-parallel messages beneath
# products) or "eager-2023".
# software = "compiled"

# What a training loop is given: samples of the global batch per second, by the loaders of a host's ranks
# all at once; and bytes from the host's memory to its devices together. Without them input costs nothing.
# Where each rank reads only its samples (a data set with indices): what one rank's loader gives, what it takes for a
# batch besides, what all cores of a host prepare, and what its storage gives. host_cores: how many these are where the
# devices are CPUs and compute on them, too.
# input_rate = 2000
# rank_input_rate = 500
# rank_batch_time = "2 ms"
# host_input_rate = 1500
# host_cores = 16
# host_fetch_rate = 4000
# copy_bandwidth = "25 GB/s"

# Equal hosts are written once. The device kind is one of the presets (H100, A100-SXM4-40GB, L4 ...)
# or a [kind.NAME] table below. preset = "AWS p5.48xlarge" fills in kind, devices, uplink, price.
[[host]]
name = "gpu"                # hosts become gpu0, gpu1
count = 2
devices = 8                 # devices in each host
kind = "H100"
link = "450 GB/s"           # device to the host's switch (NVLink, PCIe); the preset's if left out
link_latency = "2 us"
uplink = "3200 Gbit/s"      # whole host to the network; needed with more than one host
uplink_latency = "5 us"
price = "98.32 USD/h"       # of one host

# Unequal hosts: write another [[host]]. Unequal devices in one host:
# [[host]]
# name = "mixed"
# address = "10.0.0.7"
# uplink = "25 Gbit/s"
# [[host.device]]
# kind = "A100-SXM4-80GB"
# count = 2
# [[host.device]]
# kind = "mine"
# link = "31 GB/s"

# A device that is no preset:
# [kind.mine]
# peak = { float32 = "30 TFLOP/s", bfloat16 = "120 TFLOP/s" }   # dense, per dtype
# memory = "24 GiB"
# memory_bandwidth = "900 GB/s"
# backend = "cuda"                                             # or "cpu"
# launch = "5 us"                                              # fixed cost of one operator

# Racks: hosts with switch = "rack0" share that switch's uplink.
# [[switch]]
# name = "rack0"
# uplink = "1600 Gbit/s"
# latency = "3 us"
"""
