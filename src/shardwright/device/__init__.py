"""What lies around a plan's tensors on a GPU: PyTorch's allocator, NCCL's buffers, the process.

No plan depends on it: ``surroundings`` is asked of plans that there are.
"""

from shardwright.device.surroundings import Surroundings, surroundings

__all__ = ["Surroundings", "surroundings"]
