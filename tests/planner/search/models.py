"""Small captured graphs written by hand, so that the search can be tested without torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardwright.core.cluster import Cluster, Device, DeviceKind, Link, Switch
from shardwright.core.graph import Block, Operator, OperatorGraph, TensorSpec


@dataclass
class Sketch:
    """Collects tensors, operators and blocks."""

    batch: int
    tensors: list[TensorSpec] = field(default_factory=list)
    operators: list[Operator] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)

    def outside(self, name: str, shape: tuple[int, ...], role: str, dtype: str = "float32") -> int:
        trained = role == "parameter"
        self.tensors.append(
            TensorSpec(name=name, shape=shape, dtype=dtype, role=role, needs_gradient=trained)
        )
        return len(self.tensors) - 1

    def apply(
        self,
        kind: str,
        inputs: dict[str, int],
        shape: tuple[int, ...],
        dtype: str = "float32",
        flops: float = 0.0,
        **attributes: object,
    ) -> int:
        index = len(self.operators)
        trained = (
            any(self.tensors[i].needs_gradient for i in inputs.values()) and dtype == "float32"
        )
        out = len(self.tensors)
        self.operators.append(
            Operator(
                name=f"op{index}",
                kind=kind,
                inputs=tuple(inputs.values()),
                input_names=tuple(inputs),
                outputs=(out,),
                attributes=tuple(attributes.items()),
                flops=flops,
            )
        )
        self.tensors.append(
            TensorSpec(
                name=f"op{index}", shape=shape, dtype=dtype, role="activation", producer=index,
                needs_gradient=trained,
            )
        )  # fmt: skip
        return out

    def linear(self, x: int, features: int, name: str) -> int:
        shape = self.tensors[x].shape
        weight = self.outside(f"{name}.weight", (features, shape[-1]), "parameter")
        bias = self.outside(f"{name}.bias", (features,), "parameter")
        inputs = {"input": x, "weight": weight, "bias": bias}
        return self.apply("aten.linear.default", inputs, (*shape[:-1], features))

    def convolution(self, x: int, filters: int, kernel: int, name: str) -> int:
        batch, channels, height, width = self.shape(x)
        weight = self.outside(f"{name}.weight", (filters, channels, kernel, kernel), "parameter")
        return self.apply(
            "aten.conv2d.default", {"input": x, "weight": weight}, (batch, filters, height, width),
            padding=(kernel // 2, kernel // 2),
        )  # fmt: skip

    def shape(self, tensor: int) -> tuple[int, ...]:
        return self.tensors[tensor].shape

    def close_block(self, name: str, signature: str) -> None:
        start = self.blocks[-1].stop if self.blocks else 0
        self.blocks.append(
            Block(name=name, start=start, stop=len(self.operators), signature=signature)
        )

    def finish(self, name: str, scores: int, target: int) -> OperatorGraph:
        total = self.apply("shardwright.cross_entropy_sum", {"self": scores, "target": target}, ())
        count = self.apply("shardwright.count_targets", {"target": target}, ())
        loss = self.apply("aten.div.Tensor", {"self": total, "other": count}, ())
        self.close_block("head", "")
        return OperatorGraph(
            name=name, tensors=tuple(self.tensors), operators=tuple(self.operators),
            blocks=tuple(self.blocks), loss=loss,
        )  # fmt: skip


def mlp(batch: int = 8, width: int = 16, depth: int = 3, classes: int = 8) -> OperatorGraph:
    """Equal hidden layers, each a block, and a head."""
    sketch = Sketch(batch)
    x = sketch.outside("x", (batch, width), "input")
    y = sketch.outside("y", (batch,), "input", "int64")
    for layer in range(depth):
        x = sketch.linear(x, width, f"layer{layer}")
        x = sketch.apply("aten.relu.default", {"self": x}, sketch.shape(x))
        sketch.close_block(f"layer{layer}", "layer")
    return sketch.finish("mlp", sketch.linear(x, classes, "head"), y)


def residual(batch: int = 8, width: int = 16, depth: int = 2, classes: int = 8) -> OperatorGraph:
    """Gated pre-norm residual layers: tensors with several readers."""
    sketch = Sketch(batch)
    tokens = sketch.outside("x", (batch, 4, width), "input")
    y = sketch.outside("y", (batch, 4), "input", "int64")
    x = sketch.linear(tokens, width, "stem")
    sketch.close_block("stem", "")
    for layer in range(depth):
        scale = sketch.outside(f"norm{layer}.weight", (width,), "parameter")
        shift = sketch.outside(f"norm{layer}.bias", (width,), "parameter")
        normed = sketch.apply(
            "aten.layer_norm.default", {"input": x, "weight": scale, "bias": shift},
            sketch.shape(x), normalized_shape=(width,), eps=1e-5,
        )  # fmt: skip
        gate = sketch.linear(normed, 2 * width, f"gate{layer}")
        gate = sketch.apply("aten.gelu.default", {"self": gate}, sketch.shape(gate))
        up = sketch.linear(normed, 2 * width, f"up{layer}")
        both = sketch.apply("aten.mul.Tensor", {"self": gate, "other": up}, sketch.shape(up))
        down = sketch.linear(both, width, f"down{layer}")
        x = sketch.apply("aten.add.Tensor", {"self": x, "other": down}, sketch.shape(x))
        sketch.close_block(f"layer{layer}", "layer")
    scores = sketch.linear(x, classes, "head")
    flat = sketch.apply(
        "aten.view.default", {"self": scores}, (batch * 4, classes), size=(batch * 4, classes)
    )
    targets = sketch.apply(
        "aten.view.default", {"self": y}, (batch * 4,), "int64", size=(batch * 4,)
    )
    return sketch.finish("residual", flat, targets)


def images(batch: int = 2, size: int = 32, depth: int = 2, channels: int = 8) -> OperatorGraph:
    """Residual convolutions, a class for every pixel."""
    sketch = Sketch(batch)
    x = sketch.outside("images", (batch, 3, size, size), "input")
    y = sketch.outside("labels", (batch, size, size), "input", "int64")
    x = sketch.convolution(x, channels, 1, "stem")
    sketch.close_block("stem", "")
    for layer in range(depth):
        inner = sketch.convolution(x, channels, 3, f"inner{layer}")
        inner = sketch.apply("aten.relu.default", {"self": inner}, sketch.shape(inner))
        outer = sketch.convolution(inner, channels, 5, f"outer{layer}")
        x = sketch.apply("aten.add.Tensor", {"self": x, "other": outer}, sketch.shape(x))
        sketch.close_block(f"layer{layer}", "layer")
    return sketch.finish("images", sketch.convolution(x, 4, 1, "head"), y)


def squares(batch: int = 8, width: int = 16, depth: int = 2, classes: int = 8) -> OperatorGraph:
    """Layers whose result is multiplied by itself: operators that read one tensor twice."""
    sketch = Sketch(batch)
    x = sketch.outside("x", (batch, width), "input")
    y = sketch.outside("y", (batch,), "input", "int64")
    for layer in range(depth):
        x = sketch.linear(x, width, f"layer{layer}")
        x = sketch.apply("aten.mul.Tensor", {"self": x, "other": x}, sketch.shape(x))
        sketch.close_block(f"layer{layer}", "layer")
    return sketch.finish("squares", sketch.linear(x, classes, "head"), y)


def begun(batch: int = 8, width: int = 16, depth: int = 2, classes: int = 8) -> OperatorGraph:
    """A recurrence that begins with a row of zeros per sample, made once for all microbatches."""
    sketch = Sketch(batch)
    x = sketch.outside("x", (batch, width), "input")
    y = sketch.outside("y", (batch,), "input", "int64")
    state = sketch.apply("aten.zeros.default", {}, (batch, width), size=(batch, width))
    for layer in range(depth):
        new = sketch.linear(x, width, f"layer{layer}")
        state = sketch.apply("aten.add.Tensor", {"self": new, "other": state}, (batch, width))
        sketch.close_block(f"layer{layer}", "layer")
    return sketch.finish("begun", sketch.linear(state, classes, "head"), y)


def opaque(batch: int = 8) -> OperatorGraph:
    """A model that is one module nobody can see into."""
    sketch = Sketch(batch)
    x = sketch.outside("x", (batch, 16), "input")
    weight = sketch.outside("weight", (16, 16), "parameter")
    loss = sketch.apply("opaque.Model", {"tensors.0": x, "tensors.1": weight}, ())
    sketch.close_block("model", "")
    return OperatorGraph(
        name="opaque", tensors=tuple(sketch.tensors), operators=tuple(sketch.operators),
        blocks=tuple(sketch.blocks), loss=loss,
    )  # fmt: skip


def cluster(
    hosts: int = 1,
    devices: int = 2,
    *,
    memory: float = 80e9,
    near: float = 100e9,
    far: float = 10e9,
    flops: float = 100e12,
) -> Cluster:
    """Equal hosts of equal devices under one switch, a dollar an hour and host."""
    kind = DeviceKind(
        name="test", peak_flops=(("float32", flops), ("bfloat16", 2 * flops)), memory_bytes=memory,
        memory_bandwidth=2e12,
    )  # fmt: skip
    uplink = Link(latency=5e-6, bandwidth=far)
    switches = [Switch(name="root", is_host=False)]
    switches += [
        Switch(name=f"host{i}", parent=0, link=uplink, dollars_per_second=1 / 3600)
        for i in range(hosts)
    ]
    link = Link(latency=2e-6, bandwidth=near)
    members = [Device(kind=0, host=1 + i, link=link) for i in range(hosts) for _ in range(devices)]
    return Cluster(
        name=f"{hosts}x{devices}", kinds=(kind,), switches=tuple(switches), devices=tuple(members)
    )
