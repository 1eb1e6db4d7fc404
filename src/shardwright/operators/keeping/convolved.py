"""What convolutions need for a moment on CPUs: copies of pixels for a product, or blocks of channels.

PyTorch's and oneDNN's, seen through the allocator (torch 2.13, x86 with vectors of 512 bits; those of 256 bits pad
channels to 8). Images are put into blocks of channels, and results read out of such; one whose channels lie last is read
as it lies, and only weights are put into blocks. Gradients of weights that oneDNN has no kernel of blocks for are
products.
"""

from __future__ import annotations

import math

from shardwright.core.graph import DTYPE_BYTES, Operator
from shardwright.core.program import Value

# Channels of a block. Images of few are read as they lie: by forward where they do not fill one, by gradients of
# weights where they do not fill more than half of one.
LANES, HALF = 16, 8
# From so many images on oneDNN takes products of channels, too (with one thread, as a rank has here).
MANY_IMAGES = 16
# What one image of at most so many numbers is convolved by: a product with copies of its pixels.
SMALL_IMAGE, SMALL_KERNEL = 20480, 3
# Weights as wide as this are multiplied with copies of pixels; of channels each by itself, those wider than that.
WIDE, WIDE_ALONE = 15, 3


def convolution_workspaces(
    operator: Operator, ends: tuple[Value, Value, Value], *, trains_input: bool
) -> tuple[int, int]:
    """Return the bytes that forward and backward of a convolution need besides results and gradients, given its image,
    weights and result. An image with gaps in memory is copied in both."""
    copy = ends[0].bytes if operator.copied else 0
    forward, backward = _workspaces(operator, ends, trains_input=trains_input)
    return forward + copy, backward + copy


def _workspaces(
    operator: Operator, ends: tuple[Value, Value, Value], *, trains_input: bool
) -> tuple[int, int]:
    image, weight, result = ends
    twice = _twice(operator)
    few_products = _are_few_products(image, weight)
    if not any(twice) and few_products and weight.shape[1] == image.shape[1]:
        return 0, 0
    if result.dtype == "float64" or _is_small(image, weight):
        pixels = math.prod(result.shape[2:]) * image.shape[0] * image.shape[1]
        copies = pixels * math.prod(weight.shape[2:]) * DTYPE_BYTES[result.dtype]
        return copies, copies
    if twice[0] and result.shape[1] < HALF:
        return _in_blocks(image) + weight.bytes, _in_blocks(image)
    if _is_last(operator, twice) and not few_products:
        return _channels_last(operator, ends)
    return _blocked(operator, ends, twice=twice, trains_input=trains_input)


def _twice(operator: Operator) -> tuple[bool, bool]:
    """Whether results, and gradients of inputs, come by way of another tensor: transposed; strided and in one group."""
    if "transpose" in operator.kind or operator.attribute("transposed") is True:
        return True, False
    return False, _is_strided(operator) and operator.attribute("groups", 1) == 1


def _is_last(operator: Operator, twice: tuple[bool, bool]) -> bool:
    """Whether channels lie last and blocks of weights alone are needed."""
    return operator.attribute("channels_last") is True and not twice[0]


def _is_strided(operator: Operator) -> bool:
    steps = operator.attribute("stride")
    return isinstance(steps, tuple) and any(step != 1 for step in steps)


def _are_few_products(image: Value, weight: Value) -> bool:
    """Whether channels are multiplied as they lie."""
    as_it_lies = image.dtype == "float64" or image.shape[0] < MANY_IMAGES
    return math.prod(weight.shape[2:]) == 1 and as_it_lies


def _is_small(image: Value, weight: Value) -> bool:
    """Whether PyTorch leaves an image to its own kernel: there is one, of few numbers, seen whole by a small one."""
    few = math.prod(image.shape) <= SMALL_IMAGE and weight.shape[1] == image.shape[1]
    return few and image.shape[0] == 1 and max(weight.shape[2:]) <= SMALL_KERNEL


def _blocked(
    operator: Operator,
    ends: tuple[Value, Value, Value],
    *,
    twice: tuple[bool, bool],
    trains_input: bool,
) -> tuple[int, int]:
    """Return the workspaces of oneDNN: forward reads input and weights into blocks, makes blocks, then the result of
    them; backward likewise, the gradient of the input first, then that of the weights. ``twice``: whether the result,
    and the input's gradient, come by way of another tensor, which lies channels last and is filled up with none."""
    image, weight, result = ends
    read, made = _in_blocks(image), _in_blocks(result)
    weights = weight.bytes * read * made // max(image.bytes * result.bytes, 1)
    fills = image.shape[1] >= LANES
    forward = 2 * result.bytes if twice[0] else made
    read_first = (read if fills else 0) + (weights if fills else weights * image.bytes // read)
    forward = max(read_first + made - result.bytes, forward)
    if not twice[0] and _are_multiplied(operator, ends):
        columns = math.prod(weight.shape[1:]) * math.prod(result.shape[2:])
        backward = 4 * weight.bytes + columns * DTYPE_BYTES[image.dtype]
    else:
        backward = made + (read if image.shape[1] > HALF else 0) + weights - weight.bytes
        backward = max(backward, weights)
    if trains_input:
        if twice[1]:
            read = image.bytes
        whole = read + twice[1] * image.bytes
        first = max(made + weights + read - image.bytes, whole) - weight.bytes
        backward = max(backward, first)
    return forward, backward


def _channels_last(operator: Operator, ends: tuple[Value, Value, Value]) -> tuple[int, int]:
    """Return the workspaces where channels lie last: weights in that order, and in blocks, to which those of every group
    are filled up for their gradients; but for channels each by itself, if there is a kernel for these."""
    image, weight, _ = ends
    group, made = weight.shape[1], weight.shape[0] * weight.shape[1] // max(image.shape[1], 1)
    if group == made == 1:
        blocks = weight.bytes * _filled(image.shape[1]) // image.shape[1]
        many = LANES * LANES if _are_multiplied(operator, ends) else 1
        return blocks, (many + 1) * weight.bytes
    in_one = group == image.shape[1]
    forward = weight.bytes * (_filled(made) if in_one else made) // max(made, 1)
    blocks = weight.bytes * _filled(group) * _filled(made) // max(group * made, 1)
    return weight.bytes + forward, 2 * weight.bytes + blocks


def _are_multiplied(operator: Operator, ends: tuple[Value, Value, Value]) -> bool:
    """Whether gradients of weights are products: of wide ones, of few channels a group, and where channels are each by
    themselves of all but small dense ones that fit into the result, padded by no more than half."""
    image, weight, result = ends
    kernel, group = weight.shape[2:], weight.shape[1]
    if kernel[-1] >= WIDE or group == image.shape[1]:
        return kernel[-1] >= WIDE
    if _are_few_products(image, weight):
        return True
    if group > 1 or weight.shape[0] > image.shape[1]:
        return group < HALF
    is_dense = all(step == 1 for step in _numbers(operator, "dilation"))
    return not (kernel[-1] <= WIDE_ALONE and is_dense and _fits(operator, kernel, result))


def _fits(operator: Operator, kernel: tuple[int, ...], result: Value) -> bool:
    """Whether a kernel is no larger than the result, and no more than half of it lies outside of the image."""
    padding = zip(_numbers(operator, "padding"), kernel, strict=False)
    is_inside = all(pad <= size // 2 for pad, size in padding)
    extents = zip(kernel, result.shape[2:], strict=True)
    return is_inside and all(size <= extent for size, extent in extents)


def _numbers(operator: Operator, name: str) -> tuple[int, ...]:
    found = operator.attribute(name)
    return tuple(one for one in found if isinstance(one, int)) if isinstance(found, tuple) else ()


def _filled(channels: int) -> int:
    return -(-channels // LANES) * LANES


def _in_blocks(image: Value) -> int:
    """Return the bytes of an image whose channels are filled up to whole blocks."""
    return image.bytes * _filled(image.shape[1]) // max(image.shape[1], 1)
