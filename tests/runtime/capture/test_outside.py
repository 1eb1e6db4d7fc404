"""Forms of models from elsewhere that once ended as one opaque operator, or in the wrong refusal."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from shardwright.errors import CaptureError
from shardwright.planner.space import Seed, seed_strategy
from shardwright.runtime.capture import capture
from shardwright.runtime.capture.evaluating import bind_tensors, evaluate
from shardwright.runtime.capture.prepare import eager_masks
from shardwright.verbs.coverage import coverage
from tests.runtime.equivalence import assert_close, assert_equivalent, train_plain
from tests.runtime.rehearsed import train_rehearsed
from tests.runtime.strategies import named

pytestmark = pytest.mark.torch


def sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named], lr=1.0)


class Merging(nn.Module):
    """Features put where tokens mark a place for them, after a look at how many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.see, self.head = nn.Embedding(8, 4), nn.Linear(6, 4), nn.Linear(4, 8)

    def forward(self, x: Tensor, image: Tensor, y: Tensor) -> Tensor:
        words, features = self.embed(x), self.see(image)
        mask = (x == 7).unsqueeze(-1).expand_as(words)
        torch._check(words[mask].numel() == features.numel())
        torch._check((x < 8).all().item(), lambda: "no such word")  # type: ignore[arg-type]
        merged = words.masked_scatter(mask, features)
        return nn.functional.cross_entropy(self.head(merged).flatten(0, 1), y.flatten())


def merging() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    x = torch.tensor([[1, 7, 7, 2], [7, 3, 7, 0], [4, 5, 7, 7], [7, 7, 6, 6]])
    image = torch.randn(4, 2, 6, dtype=torch.float64)
    return Merging().double(), {"x": x, "image": image, "y": x.flip(0)}


def test_what_a_model_checks_of_its_values_does_not_stop_its_capture() -> None:
    module, batch = merging()
    captured = capture(module, batch)
    kinds = [operator.kind for operator in captured.graph.operators]
    assert not any(kind.startswith("opaque.") for kind in kinds)
    assert not coverage(captured.graph).replicated
    assert any("checks of its values" in note for note in captured.graph.notes)
    for seed in (Seed(data=2), Seed(data=4, zero=3), Seed(tensor=2)):
        strategy = seed_strategy(captured.graph, seed)
        runs, _ = train_rehearsed(captured, strategy, module, batch, sgd)
        assert_close(runs[0], train_plain(merging, sgd), f"merging, {seed.label}")


class Scattered(nn.Module):
    """More rows than places for them, in several dims; and single elements put where a mask has none of the same."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.see = nn.Embedding(8, 4), nn.Linear(6, 4)

    def forward(self, x: Tensor, image: Tensor) -> Tensor:
        words, features = self.embed(x), self.see(image)
        some = words.masked_scatter((x > 5)[..., None].expand(-1, -1, 4), features)
        shifted = words.masked_scatter((x > 6)[..., None], features.flip(0))
        return (some * shifted.masked_scatter(some > 0, features)).square().mean()


def scattered() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    x = torch.tensor([[1, 7, 6, 2], [7, 3, 7, 0], [4, 5, 0, 0], [7, 7, 6, 6]])
    return Scattered().double(), {"x": x, "image": torch.randn(4, 4, 6, dtype=torch.float64)}


def test_rows_are_put_where_a_mask_is_true_though_not_all_have_a_place() -> None:
    module, batch = scattered()
    captured = capture(module, batch)
    kinds = [operator.kind for operator in captured.graph.operators]
    assert kinds.count("aten.masked_scatter.default") == 1  # that of single elements
    for seed in (Seed(), Seed(data=2), Seed(data=4, zero=3), Seed(tensor=2)):
        strategy = seed_strategy(captured.graph, seed)
        runs, _ = train_rehearsed(captured, strategy, module, batch, sgd)
        assert_close(runs[0], train_plain(scattered, sgd), f"scattered, {seed.label}")


class Coding(nn.Module):
    """Says which codes of a frozen codebook lie nearest, as what tokens of pictures are learned by does."""

    def __init__(self) -> None:
        super().__init__()
        self.see, self.codes, self.net = nn.Linear(4, 3), nn.Embedding(5, 3), nn.Linear(4, 10)
        for frozen in (self.see, self.codes):
            frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.see(x).unflatten(0, (-1, 1))
        near = torch.cdist(rows.flatten(0, 1), self.codes.weight).argmin(1)
        labels = torch.stack([near, near], 1)
        scores = self.net(x).view(-1, 5)
        loss = nn.functional.cross_entropy(scores, labels.view(-1))
        return loss + nn.functional.nll_loss(
            scores.log_softmax(1), labels.view(-1), reduction="mean"
        )


def coding() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Coding().double(), {"x": torch.randn(8, 4, dtype=torch.float64)}


def test_labels_that_a_network_of_the_model_picks_allow_microbatches() -> None:
    module, batch = coding()
    captured = capture(module, batch)
    for seed in (Seed(num_microbatches=4), Seed(data=2, num_microbatches=2, zero=3)):
        strategy = seed_strategy(captured.graph, seed)
        runs, _ = train_rehearsed(captured, strategy, module, batch, sgd)
        assert_close(runs[0], train_plain(coding, sgd), f"coding, {seed.label}")


class Asking(nn.Module):
    """Asks as some releases of transformers do whether a mask that is not there is traced."""

    def __init__(self, hear: Callable[[bool], None]) -> None:
        super().__init__()
        self.hear = hear

    def forward(self, x: Tensor) -> Tensor:
        from transformers import masking_utils

        self.hear(masking_utils.is_tracing(None))
        return x * 2


def test_a_mask_that_is_not_there_is_left_to_the_kernel_as_in_an_eager_run() -> None:
    for masks, expected in ((contextlib.nullcontext(), True), (eager_masks({}), False)):
        answers: list[bool] = []
        with masks:
            torch.export.export(Asking(answers.append), (torch.rand(3),), strict=False)
        assert set(answers) == {expected}


class MultiQuery(nn.Module):
    """One weight for all queries, one key and one value, as in Falcon-7B; ``turned``: ``x @ w.T``."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.fused, self.out = nn.Linear(8, 24, bias=not turned), nn.Linear(16, 8)
        self.up, self.down, self.turned = nn.Linear(8, 8), nn.Linear(8, 8), turned

    def forward(self, x: Tensor) -> Tensor:
        made = x @ self.fused.weight.T if self.turned else self.fused(x)
        heads = made.view(*x.shape[:2], 6, 4)
        query, key, value = heads[..., :-2, :], heads[..., [-2], :], heads[..., [-1], :]
        query, key, value = [part.transpose(1, 2) for part in (query, key, value)]
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(*x.shape[:2], 16))
        return (x + self.down(self.up(x).relu())).pow(2).mean()


@pytest.mark.parametrize("turned", [False, True])
def test_queries_of_one_fused_weight_are_split_by_heads_beside_one_key(turned: bool) -> None:
    def build() -> tuple[nn.Module, dict[str, Tensor]]:
        torch.manual_seed(0)
        return MultiQuery(turned).double(), {"x": torch.randn(2, 5, 8, dtype=torch.float64)}

    module, batch = build()
    captured = capture(module, batch)
    strategy = seed_strategy(captured.graph, Seed(tensor=2))
    kinds = [operator.kind for operator in captured.graph.operators]
    place = kinds.index("aten.scaled_dot_product_attention.default")
    assert "h" in strategy.configs[place].dims
    runs, _ = train_rehearsed(captured, strategy, module, batch, sgd)
    assert_close(runs[0], train_plain(build, sgd), "queries")


class Decoder(nn.Module):
    """Torch's own decoder layers with a mask that is made in forward."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.layers = nn.TransformerDecoder(layer, 2)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        size = x.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(size, dtype=x.dtype)
        return self.layers(x, memory, tgt_mask=mask).pow(2).mean()


def check_whole_and_equal(
    build: Callable[[], tuple[nn.Module, dict[str, Tensor]]], what: str
) -> None:
    """No operator is opaque, and two data-parallel ranks train as plain PyTorch does."""
    module, batch = build()
    captured = capture(module, batch)
    assert not any(one.kind.startswith("opaque.") for one in captured.graph.operators)
    strategy = seed_strategy(captured.graph, Seed(data=2))
    runs, _ = train_rehearsed(captured, strategy, module, batch, sgd)
    assert_close(runs[0], train_plain(build, sgd), what)


def test_a_mask_that_torch_looks_at_does_not_make_its_layers_opaque() -> None:
    def build() -> tuple[nn.Module, dict[str, Tensor]]:
        torch.manual_seed(0)
        made = torch.randn(2, 4, 5, 8, dtype=torch.float64)
        return Decoder().double(), {"x": made[0], "memory": made[1]}

    check_whole_and_equal(build, "decoder")


class Correlating(nn.Module):
    """A correlation by Fourier transforms, and one with a conjugate transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        a, b = (torch.fft.fft(layer(x)) for layer in (self.one, self.two))
        c = (a * b.conj()).imag + b.conj().imag * 0.3
        return 0.01 * ((c @ c.T).sin().mean() + (a @ a.mH).abs().mean() + (a.mH @ b).imag.mean())


def correlating() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Correlating().double(), {"x": torch.randn(4, 6, dtype=torch.float64)}


def test_a_conjugate_is_not_taken_for_the_number_itself() -> None:
    ways = named(Seed(data=2), Seed(tensor=2))
    assert_equivalent(2, correlating, ways)


class Watched(nn.Module):
    """Stays opaque, for it draws in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        random.random()
        return self.net(x).tanh()


class Stopped(nn.Module):
    """Values taken without gradients by what changes nothing: a copy, a sum with zero, a view and back."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.watch = nn.Linear(6, 4), Watched()

    def forward(self, x: Tensor) -> Tensor:
        h = self.net(x)
        with torch.no_grad():
            copied, added, turned = h.clone(), h + 0, h.view(2, 8).view(4, 4)
            turned_back = h.T.contiguous()
            zeros = torch.zeros_like(h)
            zeros += h
            seen = h.expand(4, 4) + h.reshape(4, 4) + h.squeeze() + h.flatten(0, 0)
            itself = h.to(h.dtype).contiguous()
            watched = self.watch(h)
        kept = copied + added + turned + turned_back.T + zeros + seen + watched
        return (h * kept + h.sin() * copied + h * itself).mean()


def stopped() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Stopped().double(), {"x": torch.randn(4, 6, dtype=torch.float64)}


def test_a_copy_made_without_gradients_has_none() -> None:
    assert_equivalent(2, stopped, named(Seed(data=2)), partial(torch.optim.SGD, lr=0.1))


class Penalised(nn.Module):
    """Losses with terms that no sample has a part in, and a running total that begins with zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.out = nn.Linear(6, 6), nn.Linear(6, 3)
        self.spread = nn.Parameter(torch.zeros(()))
        self.token = nn.Parameter(torch.randn(1, 1, 6))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.cat([self.token.repeat(len(x), 2, 1), self.net(x)], 1)
        rows = torch.arange(len(x))
        last = h[rows, y]
        blocks = h.unflatten(-1, (3, 2))[rows[:, None, None], torch.stack([y, -y], 1)[:, None]]
        total = x.new_zeros(1)
        total = total + nn.functional.cross_entropy(self.out(last), y % 3)
        total += 0.1 * h.pow(2).mean() + (blocks.flatten(1).cumsum(1) * 0.1).sin().mean()
        total = total * torch.exp(-self.spread) + self.spread
        total = total.sum() + (1 - h.cos().mean())
        return total + 0.01 * sum(one.pow(2).sum() for one in self.net.parameters()) - 3


def penalised() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    x = torch.randn(8, 4, 6, dtype=torch.float64)
    return Penalised().double(), {"x": x, "y": torch.arange(8) % 5}


def test_penalties_and_picked_rows_leave_microbatches_possible() -> None:
    ways = named(
        Seed(data=2), Seed(data=2, num_microbatches=2), Seed(data=2, zero=3), Seed(tensor=2)
    )
    assert_equivalent(2, penalised, ways, partial(torch.optim.SGD, lr=0.1))


class Diagonal(nn.Module):
    """A diagonal filled in place, complex numbers made of pairs that lie apart, channels shuffled."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.net(x)
        scores = (h @ h.T).fill_diagonal_(0)
        pairs = torch.view_as_complex(h.view(-1, 2, 4).transpose(1, 2).contiguous())
        mixed = nn.functional.channel_shuffle(h.view(-1, 4, 2, 1), 2).squeeze(-1)
        return (
            scores.sin().mean()
            + (pairs * pairs.abs()).real.mean()
            + (mixed[..., 0] * h[:, :4]).mean()
        )


def diagonal() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Diagonal().double(), {"x": torch.randn(4, 6, dtype=torch.float64)}


def test_what_is_written_on_a_diagonal_leaves_the_model_whole() -> None:
    module, batch = diagonal()
    graph = capture(module, batch).graph
    assert not any(one.kind.startswith("opaque.") for one in graph.operators)
    assert_equivalent(2, diagonal, named(Seed(data=2), Seed(tensor=2)))


class Shuffled(nn.Module):
    """An order per sample that the batch has no part in, read as it is and with a dim more."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        order = torch.linspace(0, 40, x.shape[0] * x.shape[1]).sin().view(x.shape[:2]).argsort(1)
        weight = x.sum(-1).gather(1, order)
        picked = self.net(x).gather(1, order.unsqueeze(-1).expand(-1, -1, 4))
        return (picked.cumsum(-1).sin().sum(-1) * weight).mean()


def shuffled() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Shuffled().double(), {"x": torch.randn(8, 5, 6, dtype=torch.float64)}


def test_what_was_cut_for_microbatches_may_be_read_whole_afterwards() -> None:
    assert_equivalent(2, shuffled, named(Seed(data=2, num_microbatches=2)))


class Infinite(nn.Module):
    """A mask of minus infinity that is added by the product that makes the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.value = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.full((5, 5), -torch.inf, dtype=x.dtype).triu(1)
        query = self.query(x)
        scores = torch.baddbmm(mask, query, query.transpose(1, 2))
        return torch.bmm(scores.softmax(-1), self.value(x)).pow(2).mean()


def infinite() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Infinite().double(), {"x": torch.randn(4, 5, 6, dtype=torch.float64)}


def test_an_infinite_mask_is_added_once_where_the_product_is_split_over_what_it_sums() -> None:
    module, batch = infinite()
    captured = capture(module, batch)
    strategy = seed_strategy(captured.graph, Seed(tensor=2))
    kinds = [operator.kind for operator in captured.graph.operators]
    configs = list(strategy.configs)
    place = kinds.index("aten.baddbmm.default")
    configs[place] = replace(configs[place], dims=("", "k"))
    strategy = replace(strategy, configs=tuple(configs))
    runs, _ = train_rehearsed(captured, strategy, module, batch, sgd)
    assert_close(runs[0], train_plain(infinite, sgd), "infinite")


class Degrees(nn.Module):
    """Messages along edges, divided by degrees; loads of choices beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 4)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        h, (source, target) = self.net(x), edges
        degree = torch.bincount(target, minlength=len(x)).clamp(min=1)
        sums = torch.zeros_like(h).index_add(0, target, h[source])
        loads = h.argmax(-1).bincount(h.abs().sum(-1).detach(), 4)
        return (sums / degree[:, None]).pow(2).mean() + (h.softmax(-1).mean(0) * loads).sum()


def degrees() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    edges = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 7], [1, 1, 3, 0, 5, 2, 7, 6, 0]])
    return Degrees().double(), {"x": torch.randn(8, 6, dtype=torch.float64), "edges": edges}


def test_counts_in_as_many_bins_as_are_said_leave_the_model_whole() -> None:
    check_whole_and_equal(degrees, "degrees")


class Chunks(nn.Module):
    """Overlapping chunks by strides, of what is one part of a wider product, and all samples in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.out = nn.Linear(6, 8), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        one, two = self.net(x).chunk(2, -1)
        one, two = one.contiguous(), two.contiguous()
        chunks = one.as_strided((len(x), 3, 4, 4), (one.stride(0), 8, 4, 1))
        crossed = two.as_strided((len(x) * 5,), (4,), 2)
        return self.out(chunks).tanh().mean() + crossed.sin().mean()


def chunks() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Chunks().double(), {"x": torch.randn(4, 8, 6, dtype=torch.float64)}


def test_what_is_read_by_strides_is_what_lay_there_before_it_was_split() -> None:
    assert_equivalent(
        2, chunks, named(Seed(data=2), Seed(tensor=2)), partial(torch.optim.SGD, lr=1.0)
    )


class Documents(nn.Module):
    """Attention within documents that are packed into one row, under learned slopes, by two heads of one key."""

    def __init__(self, *, flexible: bool) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(9, 8), nn.Linear(8, 9)
        self.q, self.kv = nn.Linear(8, 8), nn.Linear(8, 8)
        self.slopes = nn.Parameter(torch.tensor([0.5, 0.25]))
        self.flexible = flexible

    def forward(self, ids: Tensor) -> Tensor:
        document = (ids == 0).cumsum(1)
        x = self.embed(ids)
        q = self.q(x).unflatten(-1, (2, 4)).transpose(1, 2)
        k, v = self.kv(x)[:, None].chunk(2, -1)
        y = self.flex(q, k, v, document) if self.flexible else self.by_hand(q, k, v, document)
        return nn.functional.cross_entropy(self.out(y.transpose(1, 2).flatten(2)).mT, ids.flip(1))

    def flex(self, q: Tensor, k: Tensor, v: Tensor, document: Tensor) -> Tensor:
        def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (i > j) & (document[b, i] == document[b, j])

        def sloped(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score - self.slopes[h] * (i - j)

        mask = create_block_mask(visible, len(q), None, 6, 6, device="cpu")
        return flex_attention(q, k, v, score_mod=sloped, block_mask=mask, enable_gqa=True)

    def by_hand(self, q: Tensor, k: Tensor, v: Tensor, document: Tensor) -> Tensor:
        i, j = torch.arange(6)[:, None], torch.arange(6)
        seen = ((i > j) & (document[:, :, None] == document[:, None]))[:, None]
        scores = q @ k.mT / 2 - self.slopes[:, None, None] * (i - j)
        weights = scores.masked_fill(~seen, -1e9).softmax(-1) * seen.any(-1, keepdim=True)
        return weights @ v


def documents(*, flexible: bool) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Documents(flexible=flexible).double(), {"ids": torch.randint(0, 9, (4, 6))}


def test_flexible_attention_trains_as_what_it_stands_for_though_no_processor_can() -> None:
    module, batch = documents(flexible=True)
    captured = capture(module, batch)
    strategy = seed_strategy(captured.graph, Seed(data=2, num_microbatches=2))
    runs, _ = train_rehearsed(captured, strategy, module, batch, sgd)
    assert_close(runs[0], train_plain(partial(documents, flexible=False), sgd), "documents")


def test_a_row_that_flexible_attention_looks_up_is_refused() -> None:
    def by_rows(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + table[i][j]

    class Rows(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)[:, None]
            return flex_attention(x, x, x, score_mod=by_rows).square().mean()

    table = torch.randn(3, 3)
    with pytest.raises(
        CaptureError, match=r"single elements, but one takes .*; name all places at once"
    ):
        capture(Rows(4, 4), {"x": torch.randn(2, 3, 4)})


MADE: dict[int, Tensor] = {}


@functools.lru_cache
def places(length: int) -> Tensor:
    return torch.arange(length)


def kept(length: int) -> Tensor:
    if length not in MADE:
        MADE[length] = torch.ones(length)
    return MADE[length]


class Remembering(nn.Module):
    """Looks up tables that functions outside of it, and its class, remember."""

    table: Tensor | None = None

    def __init__(self, memo: Callable[[int], Tensor]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.memo = memo

    def forward(self, x: Tensor) -> Tensor:
        if Remembering.table is None:
            Remembering.table = torch.full((4,), 2.0)
        rows = x @ self.embedding(places(8) * self.memo(8).long())
        return (rows * Remembering.table).square().mean()


def test_what_functions_of_a_model_remember_holds_nothing_of_its_trace() -> None:
    module, batch = Remembering(kept), {"x": torch.randn(6, 8)}
    for _ in range(2):
        captured = capture(module, batch)
        assert not captured.graph.notes
        found = evaluate(captured, bind_tensors(captured, module, batch))
        torch.testing.assert_close(found, module(**batch))


class Sliced(nn.Module):
    """A bilateral grid: coefficients looked up in a low volume, at a depth that a guide says."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.guide = nn.Conv2d(2, 8, 2, 2), nn.Conv2d(2, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        grid = self.low(x).unflatten(1, (2, 4))
        line = torch.linspace(-1, 1, x.shape[-1], dtype=x.dtype)
        rows, columns = torch.meshgrid(line, line, indexing="ij")
        depth = self.guide(x).squeeze(1).tanh()
        where = torch.stack([columns.expand_as(depth), rows.expand_as(depth), depth], -1)
        sliced = nn.functional.grid_sample(grid, where.unsqueeze(1), align_corners=True)
        return (sliced.squeeze(2) * x).square().mean()


def sliced() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Sliced().double(), {"x": torch.randn(4, 2, 4, 4, dtype=torch.float64)}


def test_points_looked_up_in_volumes_are_split_and_leave_microbatches_possible() -> None:
    ways = named(Seed(data=2, num_microbatches=2), Seed(tensor=2))
    assert_equivalent(2, sliced, ways, partial(torch.optim.SGD, lr=1.0))
