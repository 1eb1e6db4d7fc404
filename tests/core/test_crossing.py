"""Pieces between meshes of any size and cut: every element arrives, and arrives once."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.core.crossing import arrival, elements_between, pieces_between
from shardwright.core.layout import FLAT, PARTIAL, REPLICATE, local_shape, shard_offsets
from shardwright.core.strategy import Mesh

SHAPE = (24, 12)


@st.composite
def meshes(draw):
    sizes = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=2)))
    first = draw(st.integers(0, 6))
    order = draw(st.permutations(range(first, first + math.prod(sizes))))
    return Mesh(axes=tuple("abc"[: len(sizes)]), sizes=sizes, devices=tuple(order))


def layouts(mesh):
    return st.tuples(*(st.sampled_from([REPLICATE, 0, 1]) for _ in mesh.sizes)).filter(
        lambda layout: all(
            size % math.prod(n for p, n in zip(layout, mesh.sizes, strict=True) if p == dim) == 0
            for dim, size in enumerate(SHAPE)
        )
    )


def shards(whole, mesh, layout):
    sizes = local_shape(whole.shape, layout, mesh.sizes)
    found = {}
    for device in mesh.devices:
        offsets = shard_offsets(whole.shape, layout, mesh.sizes, mesh.coordinate(device))
        box = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
        found[device] = whole[box]
    return found


def cut(box):
    return tuple(slice(first, first + size) for first, size in box)


@given(st.data())
def test_every_shard_is_put_together_from_pieces_that_do_not_overlap(data):
    here, there = data.draw(meshes()), data.draw(meshes())
    lying, wanted = data.draw(layouts(here)), data.draw(layouts(there))
    whole = np.arange(math.prod(SHAPE), dtype=float).reshape(SHAPE)
    held, expected = shards(whole, here, lying), shards(whole, there, wanted)
    arrived = {device: np.zeros_like(shard) for device, shard in expected.items()}
    for piece in pieces_between(SHAPE, here, lying, there, wanted):
        arrived[piece.destination][cut(piece.put)] += held[piece.source][cut(piece.taken)]
    for device, shard in expected.items():
        np.testing.assert_array_equal(arrived[device], shard)


@given(st.data(), st.sampled_from((0, 1000)))
def test_elements_are_those_of_the_pieces_wherever_the_meshes_are(data, away):
    here, other = data.draw(meshes()), data.draw(meshes())
    there = replace(other, devices=tuple(device + away for device in other.devices))
    lying, wanted = data.draw(layouts(here)), data.draw(layouts(there))
    source = local_shape(SHAPE, lying, here.sizes), lying, here
    result = local_shape(SHAPE, wanted, there.sizes), wanted, there
    pieces = pieces_between(SHAPE, here, lying, there, wanted)
    found = [(one.source, one.destination, one.num_elements) for one in pieces]
    assert elements_between(source, result) == found


@given(st.data())
def test_what_a_device_holds_itself_does_not_travel(data):
    here, there = data.draw(meshes()), data.draw(meshes())
    lying, wanted = data.draw(layouts(here)), data.draw(layouts(there))
    if here.sizes == there.sizes and lying == wanted:
        return  # equal cuts keep to equal coordinates
    whole = np.arange(math.prod(SHAPE)).reshape(SHAPE)
    held = shards(whole, here, lying)
    for piece in pieces_between(SHAPE, here, lying, there, wanted):
        if piece.source != piece.destination and piece.destination in held:
            taken = held[piece.source][cut(piece.taken)]
            assert not np.isin(taken, held[piece.destination]).any()


@given(st.data())
def test_what_arrives_in_shards_travels_once(data):
    here, there = data.draw(meshes()), data.draw(meshes())
    lying, wanted = data.draw(layouts(here)), data.draw(layouts(there))
    sharded = arrival(SHAPE, wanted, there.sizes)
    assert all(new == old for new, old in zip(sharded, wanted, strict=True) if old != REPLICATE)
    if REPLICATE in [p for p, n in zip(sharded, there.sizes, strict=True) if n > 1]:
        return  # no dim divides
    pieces = pieces_between(SHAPE, here, lying, there, sharded)
    assert sum(piece.num_elements for piece in pieces) == math.prod(SHAPE)


def test_a_partial_sum_only_travels_between_meshes_cut_alike():
    one = Mesh(axes=("a",), sizes=(2,), devices=(0, 1))
    two = Mesh(axes=("a",), sizes=(2,), devices=(2, 3))
    ends = [(p.source, p.destination) for p in pieces_between((4,), one, (-2,), two, (PARTIAL,))]
    assert ends == [(0, 2), (1, 3)]
    three = Mesh(axes=("a",), sizes=(3,), devices=(2, 3, 4))
    with pytest.raises(ValueError, match="partial sums"):
        pieces_between((4,), one, (PARTIAL,), three, (PARTIAL,))


@given(st.data())
def test_terms_of_a_sum_all_travel_and_arrive_as_the_sum(data):
    here, there = data.draw(meshes()), data.draw(meshes())
    lying = tuple(data.draw(st.sampled_from([one, PARTIAL])) for one in data.draw(layouts(here)))
    wanted = data.draw(layouts(there))
    random = np.random.default_rng(0)
    terms, held = {}, {}
    for device in here.devices:
        place = here.coordinate(device)
        term = tuple(at for at, one in zip(place, lying, strict=True) if one == PARTIAL)
        terms.setdefault(term, random.integers(0, 9, SHAPE))
        held[device] = shards(terms[term], here, lying)[device]
    if here.sizes == there.sizes and lying == wanted:
        return  # equal cuts keep to equal coordinates
    expected = shards(sum(terms.values()), there, wanted)
    made = {device: np.zeros_like(one) for device, one in expected.items()}
    for piece in pieces_between(SHAPE, here, lying, there, wanted):
        made[piece.destination][cut(piece.put)] += held[piece.source][cut(piece.taken)]
    for device, one in expected.items():
        np.testing.assert_array_equal(made[device], one)


@pytest.mark.parametrize("count", [1, 5, 6, 7])
def test_flat_shards_travel_to_whole_tensors_and_back_without_their_padding(count):
    flat = Mesh(axes=("s",), sizes=(3,), devices=(0, 1, 2))
    whole = Mesh(axes=("a", "b"), sizes=(2, 2), devices=(2, 3, 4, 5))
    row = np.arange(1, count + 1)
    width = -(-count // 3)
    padded = np.pad(row, (0, 3 * width - count))
    found = {device: np.zeros(count, dtype=int) for device in whole.devices}
    for piece in pieces_between((count, 1), flat, (FLAT,), whole, (REPLICATE, REPLICATE)):
        part = padded[piece.source * width : (piece.source + 1) * width]
        found[piece.destination][cut(piece.put)] += part[cut(piece.taken)]
    assert all((one == row).all() for one in found.values())
    summed = {device: np.zeros(width, dtype=int) for device in flat.devices}
    for piece in pieces_between((count, 1), whole, (PARTIAL, REPLICATE), flat, (FLAT,)):
        summed[piece.destination][cut(piece.put)] += row[cut(piece.taken)]
    assert (np.concatenate([*summed.values()]) == 2 * padded).all()


def test_flat_shards_that_two_axes_cut_or_of_shards_are_gathered_first():
    flat = Mesh(axes=("a", "b"), sizes=(2, 2), devices=(0, 1, 2, 3))
    other = Mesh(axes=("c",), sizes=(2,), devices=(4, 5))
    for lying, wanted in (((FLAT, FLAT), (REPLICATE,)), ((FLAT, REPLICATE), (0,))):
        with pytest.raises(ValueError, match="gather them first"):
            pieces_between((8,), flat, lying, other, wanted)


def test_more_messages_than_any_network_bears_are_refused_before_they_are_listed():
    here = Mesh(axes=("x",), sizes=(1024,), devices=tuple(range(1024)))
    there = Mesh(axes=("x",), sizes=(1024,), devices=tuple(range(1024, 2048)))
    with pytest.raises(ValueError, match=r"1,048,576 messages.*fewer devices"):
        pieces_between((2048, 4), here, (0,), there, (REPLICATE,))
    assert len(pieces_between((2048, 4), here, (0,), there, (0,))) == 1024


def test_thousands_of_devices_find_their_pieces_without_trying_every_pair():
    here = Mesh(axes=("x",), sizes=(2048,), devices=tuple(range(2048)))
    there = Mesh(axes=("x", "y", "z"), sizes=(256, 4, 2), devices=tuple(range(2048)))
    for (one, lying), (other, wanted) in itertools.permutations([(here, (0,)), (there, (0, 1, 0))]):
        pieces = pieces_between((4096, 8), one, lying, other, wanted)
        assert len(pieces) == 4 * 2048
        assert sum(piece.num_elements for piece in pieces) == 4096 * 8


def test_replicas_take_turns():
    here = Mesh(axes=("x", "y"), sizes=(2, 3), devices=tuple(range(6)))
    there = Mesh(axes=("x",), sizes=(6,), devices=tuple(range(6, 12)))
    sources = [p.source for p in pieces_between((12,), here, (0, REPLICATE), there, (0,))]
    assert sources == [0, 1, 2, 3, 4, 5]
