"""Messages over a seeded network that loses, reorders, repeats and damages packets."""

from dataclasses import replace

import numpy as np
import pytest

from shardwright.errors import InputError, RunError
from shardwright.lossy import Parts, Sums, Tolerance, Transport, seeded_dropper
from shardwright.lossy.endpoint import Endpoint
from shardwright.lossy.labels import labelled
from shardwright.lossy.messages import uniform
from shardwright.lossy.pace import Pace, Report
from shardwright.lossy.packets import HEADER_BYTES, Packets, Shape, blank, heads_of, seal
from shardwright.lossy.settings import lost_at_most
from tests.lossy.network import Faults, LossyNetwork, unlabelled

SMALL = Transport(packet_bytes=256, timeout=20)  # 26 values of 8 bytes a packet
VALUES = 26
ALL_FAULTS = {"reordered": 0.2, "repeated": 0.1, "damaged": 0.03}
KEY = bytes(range(16))


def given(size, count):
    return [np.random.default_rng(rank).standard_normal(count) for rank in range(size)]


def summed(size, count, faults, tolerance, *, seed=0, parts=None):
    """Sum drawn arrays on every rank; return results, each rank's sums, and the network."""
    inputs, sums = given(size, count), {}

    def target(rank):
        sums[rank.rank] = mine = Sums(rank, tolerance)
        flat = inputs[rank.rank].copy()
        yield from mine.sum(flat, parts)
        yield from mine.settle()
        return flat

    network = LossyNetwork(size, faults, seed, SMALL)
    return network.run(target), sums, network


def in_rank_order(arrays):
    total = arrays[0].copy()
    for one in arrays[1:]:
        total = total + one
    return total


def test_checksums_are_those_of_the_authors_of_siphash():
    """The vector of the paper's appendix: key 00..0f, input 00..0e."""
    packets = blank(1, 64)
    packets.rows[0, 8:23], packets.lengths[0] = np.arange(15), 23
    seal(packets, KEY)
    assert heads_of(packets.rows)["checksum"][0] == 0xA129CA6149BE45E5


def test_a_bound_is_the_decimal_it_is_written_as():
    for thousandths in (0, 1, 7, 10, 35, 100, 290, 300, 999):
        for packets in range(1, 400):
            delivered = packets - lost_at_most(thousandths / 1000, packets)
            assert delivered == -(-(1000 - thousandths) * packets // 1000)


@pytest.mark.parametrize("form", ["direct", "ring"])
def test_whatever_packets_suffer_all_ranks_get_one_sum_and_nothing_is_lost_for_good(form):
    for size, loss, push in (
        (2, 0.0, 0.1),
        (3, 0.02, 0.1),
        (5, 0.2, 0.1),
        (4, 0.5, 0.1),
        (3, 0.5, 0.0),
    ):
        count = VALUES * 50
        faults = Faults(loss=loss, **ALL_FAULTS)
        results, sums, _ = summed(size, count, faults, Tolerance(push=push, form=form), seed=size)
        expected = in_rank_order(given(size, count))
        owed = sum(one.residuals.get("", np.zeros(count)) for one in sums.values())
        assert all(np.array_equal(one, results[0]) for one in results)
        np.testing.assert_allclose(results[0] + owed, expected, rtol=0, atol=1e-12)
        for one in sums.values():
            assert one.num_lost <= push * one.num_values


@pytest.mark.parametrize("form", ["direct", "ring"])
@pytest.mark.parametrize("count", [0, 1, 2])
def test_ranks_without_a_piece_of_what_is_short_take_part(form, count):
    faults = Faults(loss=0.2, **ALL_FAULTS)
    results, _, _ = summed(3, count, faults, Tolerance(push=0.1, form=form))
    for one in results:
        np.testing.assert_allclose(one, in_rank_order(given(3, count)), rtol=1e-15)


@pytest.mark.parametrize(
    ("flat", "parts", "says"),
    [
        (np.ones((4, 5)), None, r"ndarray of float64 and shape \(4, 5\); convert"),
        (np.ones(20, ">f8"), None, "of >f8"),
        (np.ones(20, np.bool_), None, "of bool"),
        ([1.0, 2.0], None, "not of list"),
        (np.ones(20), Parts(("a",), (10,)), "add up to 20 values here"),
        (np.ones(20), Parts(("a", "b"), (20,)), "a name and a size each"),
    ],
    ids=["rows", "byte order", "bool", "list", "too few", "no size"],
)  # fmt: skip
def test_arrays_that_cannot_be_summed_are_refused(flat, parts, says):
    def target(rank):
        yield from Sums(rank, Tolerance()).sum(flat, parts)

    with pytest.raises(InputError, match=says):
        LossyNetwork(2, Faults(), 0, SMALL).run(target)


def test_with_nothing_allowed_to_be_lost_sums_are_those_in_rank_order_to_the_last_bit():
    inputs = given(4, 1001)
    results, _, network = summed(4, 1001, Faults(loss=0.2, **ALL_FAULTS), Tolerance(push=0))
    assert np.array_equal(results[3], in_rank_order(inputs))
    assert sum(one.counts.resent for one in network.endpoints) > 0


def test_a_network_that_loses_nothing_delivers_everything_whatever_the_bound():
    results, sums, _ = summed(3, 3000, Faults(), Tolerance(push=0.5))
    assert np.array_equal(results[0], in_rank_order(given(3, 3000)))
    assert all(one.num_lost == 0 for one in sums.values())


def one_message(lost, bound, packets=40, transport=SMALL, important=()):
    """Send a message of which some packets never come; return what came."""
    data = np.arange(1.0, packets * VALUES + 1)

    def loss_of(row, _):
        head = heads_of(row[None])[0]
        return float(head["kind"] == 1 and head["offset"] // VALUES in lost)

    def target(rank):
        shape = rank.endpoint.shape(len(data), 8)
        allowance = uniform(shape, lost_at_most(bound, packets))
        if rank.rank == 0:
            labels = unlabelled(shape)
            labels.important[list(important)] = True
            yield [rank.post(1, 7, data, allowance, labels)]
            return None
        message = rank.expect(0, 7, data, allowance)
        yield [message]
        return message.memory.view(np.float64)

    return LossyNetwork(2, Faults(loss_of=loss_of), 0, transport).run(target)[1], data


def test_a_message_ends_with_exactly_as_much_as_the_bound_asks_for_and_zeros():
    lost = {0, 3, 17, 39}
    came, data = one_message(lost, 0.1)
    places = np.arange(len(data)) // VALUES
    assert np.array_equal(came, np.where(np.isin(places, list(lost)), 0, data))


@pytest.mark.parametrize(
    ("lost", "important"), [({1, 2, 3, 4, 5}, ()), ({9}, (9,))], ids=["one too many", "important"]
)
def test_a_message_that_cannot_come_is_told_with_rank_message_and_remedy(lost, important):
    with pytest.raises(RunError, match="rank 1 has not confirmed message 7 of rank 0; see"):
        one_message(lost, 0.1, transport=replace(SMALL, timeout=0.5), important=important)


def test_a_rank_that_died_is_named_by_those_who_wait_for_it():
    with pytest.raises(
        RunError,
        match=r"within 20 s, but rank 0 has got 0 of 10 packets of sum 0 \(push, hop 0, part 0\) of rank 1; see .*, or raise timeout",
    ):
        summed(2, 500, Faults(dead=frozenset({1})), Tolerance())


def test_packets_of_others_are_dropped_and_change_nothing():
    """Another job's, forged, damaged, cut, and noise: all of the right form otherwise."""
    network = LossyNetwork(2, Faults(), 0, SMALL, KEY)
    stranger = Endpoint(0, 2, bytes(16), SMALL)
    data = np.full(VALUES * 4, 99.0)
    shape = stranger.shape(len(data), 8)
    stranger.post(1, 7, data, uniform(shape, 0), unlabelled(shape), 0.0)
    foreign = stranger.emit(0.0)
    noise = np.random.default_rng(0).integers(0, 256, foreign.rows.shape, np.uint8)
    cut = np.full(len(foreign), HEADER_BYTES - 9)
    for rows, lengths in (
        (foreign.rows, foreign.lengths),
        (noise, foreign.lengths),
        (foreign.rows, cut),
    ):
        network.inject(Packets(rows, lengths, foreign.to, foreign.tos))

    def target(rank):
        if rank.rank == 0:
            yield [rank.post(1, 7, data / 9, uniform(shape, 0), unlabelled(shape))]
            return None
        message = rank.expect(0, 7, data, uniform(shape, 0))
        yield [message]
        return message.memory.view(np.float64)

    assert np.array_equal(network.run(target)[1], data / 9)
    assert network.endpoints[1].counts.rejected == 3 * len(foreign)


def test_ranks_that_send_different_messages_are_told_apart():
    def target(rank):
        flat = np.ones(100 + rank.rank)
        yield from Sums(rank, Tolerance()).sum(flat)

    with pytest.raises(
        RunError, match=r"equal messages, but sum 0 .* of rank \d .* (50|51) values"
    ):
        LossyNetwork(2, Faults(), 0, SMALL).run(target)


def test_a_parameter_with_a_bound_of_its_own_loses_no_more_than_that():
    parts = Parts(("weight", "bias"), (VALUES * 60, VALUES * 60))
    tolerance = Tolerance(push=0.3, bounds={"bias": 0.0}, important=0)
    _, sums, _ = summed(2, VALUES * 120, Faults(loss=0.2), tolerance, parts=parts)
    assert all("bias" not in one.residuals for one in sums.values())
    assert any("weight" in one.residuals for one in sums.values())


def test_what_is_lost_counts_as_zero_or_is_made_up_for_without_bias():
    """Every rank gives ones: zero-filled sums are short by what was lost, rescaled ones never are."""
    sums = {}
    for fill in ("zero", "rescale"):

        def target(rank, fill=fill):
            sums[rank.rank] = mine = Sums(
                rank, Tolerance(push=0.3, fill=fill, error_feedback=False)
            )
            flat = np.ones(VALUES * 60)
            yield from mine.sum(flat)
            return flat

        results = LossyNetwork(3, Faults(loss=0.15), 1, SMALL).run(target)
        lost = sum(one.num_lost for one in sums.values())
        assert lost > 0
        assert 3 * VALUES * 60 - results[0].sum() == (lost if fill == "zero" else 0)


def test_rescaled_sums_are_unbiased():
    """The mean over many seeds is within three standard errors of the sum of all."""
    count = VALUES * 20
    tolerance = Tolerance(push=0.4, fill="rescale", error_feedback=False, important=0)
    expected = in_rank_order(given(3, count))
    errors = [
        (summed(3, count, Faults(loss=0.2), tolerance, seed=seed)[0][0] - expected).mean()
        for seed in range(30)
    ]
    assert abs(np.mean(errors)) < 3 * np.std(errors, ddof=1) / np.sqrt(len(errors))


def test_stale_values_stand_where_new_ones_were_lost():
    """Ranks add 1, 2 and 4, of which nothing is lost, then ten times that: sums are of old and new."""

    def loss_of(row, _):
        head = heads_of(row[None])[0]
        return 0.2 * (head["kind"] == 1 and head["message"] >= 2**33)

    def target(rank):
        mine = Sums(rank, Tolerance(push=0.4, fill="stale", error_feedback=False))
        for factor in (1, 10):
            flat = np.full(VALUES * 60, 2.0**rank.rank * factor)
            yield from mine.sum(flat)
        return flat

    result = LossyNetwork(3, Faults(loss_of=loss_of), 3, SMALL).run(target)[0]
    # Bit r of a choice says whether rank r's new value came: 7 of all, 0 of none.
    possible = {7 + 9 * choice for choice in range(1, 8)}
    assert set(np.unique(result)) <= possible
    assert len(np.unique(result)) > 1


def test_labels_protect_the_largest_and_offer_the_smallest_and_put_front_layers_first():
    shape = Shape(1000, 4, 10)
    values = np.repeat(np.random.default_rng(0).permutation(100), 10).astype(np.float32)
    smallest = {int(one) for one in np.argsort(values[::10])[:8]}
    for policy, priority, offered in (
        ("magnitude", 7, 8), ("none", 0, 0), ("layer", 7, 0), ("layer", 0, 8), ("both", 7, 4), ("both", 0, 8),
    ):  # fmt: skip
        labels = labelled(values, shape, 2, Tolerance(droppable=policy), priority)
        assert set(np.flatnonzero(labels.important)) == set(np.argsort(values[::10])[-5:])
        dropped = set(np.flatnonzero(labels.tos & 3 == 0))
        assert len(dropped) == offered
        assert not dropped & set(np.flatnonzero(labels.important))
        assert policy == "layer" or dropped <= smallest
        assert {int(one) >> 5 for one in labels.tos} == {7 - priority}


def test_ranks_that_know_the_line_take_turns_and_packets_of_any_size_fit_its_pace():
    """Eight messages of a second each into one line: the last is through after eight, none much earlier
    than its turn; packets may be larger than what is sent at once."""
    for packet_bytes in (1448, 65_000):
        transport = Transport(rate=1e5, packet_bytes=packet_bytes, timeout=60)
        network, ends = LossyNetwork(9, Faults(), 0, transport), []

        def target(rank, network=network, ends=ends):
            data = np.zeros(12_500)
            shape = rank.endpoint.shape(len(data), 8)
            if rank.rank:
                yield [rank.post(0, 1, data, uniform(shape, 0), unlabelled(shape))]
                ends.append(network.now)
            else:
                yield [rank.expect(one, 1, data, uniform(shape, 0)) for one in range(1, 9)]

        network.run(target)
        np.testing.assert_allclose(ends, np.arange(1, 9), atol=0.7)


def test_a_thread_that_wakes_a_millisecond_late_keeps_a_fast_link_busy():
    rate, packet_bytes = 1.25e8, 1448
    pace, now, sent = Pace(Transport(rate=rate, window=512)), 0.0, 0
    for _ in range(100):
        now += 0.001
        count = pace.quota(now)
        pace.sent(count, now)
        sent += count
        pace.take(Report(pace.sequence, sent, 0, int(now * 1e6)), now, 0.1)
    assert sent * packet_bytes == pytest.approx(100 * 0.001 * rate, rel=0.01)


def begun(sender, to, packets):
    """Post a message of so many packets, and return it with what goes out at once."""
    data = np.zeros(packets * VALUES)
    shape = sender.shape(len(data), 8)
    message = sender.post(to, packets, data, uniform(shape, 1), unlabelled(shape), 0.0)
    return message, sender.emit(0.0, 64)


def test_who_sends_to_one_of_many_ranks_sends_as_much_at_once_as_to_the_only_other():
    wide = replace(SMALL, window=64)
    few, many = (Endpoint(0, size, KEY, wide) for size in (2, 9))
    assert len(begun(few, 1, 100)[1]) == len(begun(many, 1, 100)[1]) == 64


def test_a_last_packet_that_is_lost_and_forgiven_does_not_count_as_silence():
    """The window is then as large as if it had come, but for that packet."""

    def sent_next(lost):
        sender, receiver = (Endpoint(rank, 2, KEY, SMALL) for rank in range(2))
        message, packets = begun(sender, 1, 12)
        kept = np.delete(np.arange(13), lost)  # END is behind them
        columns = (packets.lengths, packets.to, packets.tos)
        receiver.expect(0, 12, np.zeros(12 * VALUES), uniform(message.shape, 1), 0.0)
        receiver.take(Packets(packets.rows[kept], *(one[kept] for one in columns)), 0.0)
        sender.take(receiver.emit(SMALL.grace), SMALL.grace)
        assert message.is_done
        sender.emit(1.0)
        return len(begun(sender, 1, 100)[1])

    assert sent_next([11]) == sent_next([]) - 1


def test_marks_shrink_the_window_and_tolerated_losses_do_not():
    def after(*, lost, marked):
        pace, now = Pace(SMALL), 0.0
        total = Report()
        for _ in range(30):
            now += 0.001
            pace.sent(10, now)
            total = Report(
                pace.sequence, total.received + 10 - lost, total.marked + marked, int(now * 1e6)
            )
            pace.take(total, now + 0.001, 0.1)
        return pace.window

    free = after(lost=0, marked=0)
    assert after(lost=1, marked=0) > 0.8 * free
    assert after(lost=6, marked=0) < 0.2 * free
    assert after(lost=0, marked=10) < 0.2 * free


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"push": 1.0}, "push is a share"),
        ({"push": "1%"}, "not '1%'"),
        ({"bounds": [0.1]}, "bounds are a mapping"),
        ({"bounds": {"bias": -1}}, "bias is a share"),
        ({"fill": "rescale", "form": "ring"}, "form='direct'"),
        ({"fill": "stale"}, "error_feedback=False"),
        ({"error_feedback": "no"}, "not 'no'; choose one"),
        ({"droppable": "some"}, "must be one of none, layer"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_are_refused(settings, says):
    with pytest.raises(InputError, match=says):
        Tolerance(**settings)


def test_rates_times_and_shares_are_numbers():
    for name in ("rate", "timeout"):
        with pytest.raises(InputError, match=f"{name}.*'fast'"):
            Transport(**{name: "fast"})
    with pytest.raises(InputError, match="from 0 to 1, not 5"):
        seeded_dropper(5, 1)
    with pytest.raises(InputError, match="from 0 to 1, not None"):
        seeded_dropper(None, 1)
