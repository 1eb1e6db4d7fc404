"""Matrix products: linear layers, batched products and einsum."""

from __future__ import annotations

from shardwright.operators.equation import dims
from shardwright.operators.splitting.iteration import Iteration
from shardwright.operators.splitting.rules.notation import equation
from shardwright.operators.splitting.rules.signature import (
    Names,
    NotUnderstood,
    Rule,
    Signature,
    broadcast,
    family,
    leading,
    numbered,
    space,
)


def matmul(call: Signature) -> Iteration:
    """Multiply ``b.. n k`` by ``b.. k m``, either of which may be a vector or lack batch dims."""
    left, right = call.inputs
    if not left or not right:
        raise NotUnderstood("matmul of a scalar")
    rows = ("n",) if len(left) > 1 else ()
    columns = ("m",) if len(right) > 1 else ()
    full = call.outputs[0][: len(call.outputs[0]) - len(rows) - len(columns)]
    batch = leading(len(full))
    names_left = (*broadcast(left[:-2], batch, full), *rows, "k")
    names_right = (*broadcast(right[:-2], batch, full), "k", *columns)
    return space(call, [names_left, names_right], [(*batch, *rows, *columns)])


def product_added_to(rule: Rule) -> Rule:
    """Let a matrix product be added to ``self``, which is broadcast and counted once."""

    def added(call: Signature) -> Iteration:
        product = rule(call)
        full = call.outputs[0]
        first = broadcast(call.inputs[0], product.outputs[0], full)
        return space(call, [first, *product.inputs[1:]], product.outputs, once=(0,))

    return added


def einsum(call: Signature) -> Iteration:
    """Read the dims off the equation; ``...`` stands for the broadcast dims ``e0, e1, ...``."""
    text = call.attribute("equation")
    if not isinstance(text, str):
        raise NotUnderstood("einsum without an equation")
    found = dims(text, [len(shape) for shape in call.inputs])
    if found is None:
        raise NotUnderstood(f"{text} for {len(call.inputs)} tensors")
    return space(call, *_splittable(call, *found))


def _splittable(
    call: Signature, inputs: list[Names], output: Names
) -> tuple[list[Names], list[Names]]:
    """Blank what is broadcast (size 1 here, larger elsewhere) and what is on a diagonal."""
    tensors = [*zip(inputs, call.inputs, strict=True), (output, call.outputs[0])]
    size: dict[str, int] = {}
    diagonal: set[str] = set()
    for names, shape in tensors:
        for name, extent in zip(names, shape, strict=True):
            size[name] = max(size.get(name, 1), extent)
        diagonal.update(name for name in names if names.count(name) > 1)
    kept = [
        tuple(
            name if name not in diagonal and extent == size[name] else ""
            for name, extent in zip(names, shape, strict=True)
        )
        for names, shape in tensors
    ]
    return kept[:-1], kept[-1:]


def inner(call: Signature) -> Iteration:
    """Multiply all rows of one tensor by all rows of another, along the last dim of both."""
    left, right = call.inputs
    if not left or not right:
        raise NotUnderstood("an inner product with a scalar")
    rows, columns = numbered(len(left) - 1, "n"), numbered(len(right) - 1, "m")
    return space(call, [(*rows, "k"), (*columns, "k")], [(*rows, *columns)])


def contraction(call: Signature) -> Iteration:
    """Sum over pairs of dims, of which there may be none; the others follow each other."""
    left, right = (
        list(numbered(len(shape), letter))
        for shape, letter in zip(call.inputs, ("n", "m"), strict=True)
    )
    pairs = zip(call.integers("dims_self"), call.integers("dims_other"), strict=True)
    summed = {f"k{number}": pair for number, pair in enumerate(pairs)}
    for name, (one, other) in summed.items():
        left[one] = right[other] = name
    free = [name for name in (*left, *right) if name not in summed]
    return space(call, [tuple(left), tuple(right)], [tuple(free)])


def kronecker(call: Signature) -> Iteration:
    """Put a multiple of the second tensor at every element of the first, whose dims split; the second's do where
    it repeats along none of the first's."""
    names = numbered(len(call.outputs[0]))
    left = (1,) * (len(names) - len(call.inputs[0])) + call.inputs[0]
    ours = tuple(name if size > 1 else "" for name, size in zip(names, left, strict=True))
    theirs = tuple("" if mine else name for name, mine in zip(names, ours, strict=True))
    ranks = [len(shape) for shape in call.inputs]
    return space(
        call,
        [of[len(of) - rank :] for of, rank in zip((ours, theirs), ranks, strict=True)],
        [names],
    )


def linear_blocks(call: Signature) -> Iteration:
    """Several linear maps of one input whose weights are one tensor: split, each gives its share."""
    weight = "_ n k" if call.attribute("rows") is not False else "k _ n"
    results = ", ".join(["b.. n"] * len(call.outputs))
    return equation(f"input b.. k, weight {weight}, +bias _ n -> {results}")(call)


RULES: dict[str, Rule] = {
    "aten.linear.default": equation("input b.. k, weight n k, +bias n -> b.. n"),
    "shardwright.linear_blocks": linear_blocks,
    "aten.matmul.default": matmul,
    "aten.mm.default": equation("self n k, mat2 k m -> n m"),
    "aten.bmm.default": equation("self b n k, mat2 b k m -> b n m"),
    "aten.mv.default": equation("self n k, vec k -> n"),
    "aten.dot.default": equation("self k, tensor k ->"),
    "aten.vdot.default": equation("self k, other k ->"),
    **family(equation("self n, vec2 m -> n m"), "outer.default ger.default"),
    "aten.addmm.default": product_added_to(equation("self _.., mat1 n k, mat2 k m -> n m")),
    "aten.addmv.default": product_added_to(equation("self _.., mat n k, vec k -> n")),
    "aten.addr.default": product_added_to(equation("self _.., vec1 n, vec2 m -> n m")),
    "aten.baddbmm.default": product_added_to(
        equation("self _.., batch1 b n k, batch2 b k m -> b n m")
    ),
    "aten.addbmm.default": product_added_to(
        equation("self _.., batch1 b n k, batch2 b k m -> n m")
    ),
    "aten.einsum.default": einsum,
    "aten.inner.default": inner,
    "aten.tensordot.default": contraction,
    "shardwright.kron": kronecker,
    "aten.cdist.default": equation("x1 b.. n _, x2 b.. m _ -> b.. n m"),
    "aten.bilinear.default": equation("input1 b.. i, input2 b.. k, weight n i k, +bias n -> b.. n"),
    "shardwright.grouped_product": equation("input r k, weight _ k n, groups r -> r n"),
    # Rows are sorted by expert and `offs` marks where each expert's rows end, so that neither rows
    # nor experts split into equal pieces.
    "transformers.grouped_mm_fallback.default": equation("input _ k, weight _ k n, offs _ -> _ n"),
    "aten._grouped_mm.default": equation("self _ k, mat2 _ k n, offs _ -> _ n"),
}
