"""Training while packets are lost is as good as without, within what seeds differ by."""

import numpy as np

from shardwright.lossy import Sums, Tolerance, Transport
from tests.lossy.network import Faults, LossyNetwork

FEATURES, CLASSES, BATCH, STEPS, RANKS = 25, 100, 32, 30, 2
FIXED = np.random.default_rng(7).standard_normal((FEATURES, CLASSES))


def samples(seed, count):
    x = np.random.default_rng(seed).standard_normal((count, FEATURES))
    return x, (x @ FIXED).argmax(1)


def shares(weights, x):
    powers = np.exp(x @ weights - (x @ weights).max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


def gradient(weights, x, y):
    return x.T @ (shares(weights, x) - np.eye(CLASSES)[y]) / len(y)


def loss(weights):
    x, y = samples(10**6, 1000)
    return -np.log(shares(weights, x)[np.arange(len(y)), y]).mean()


def batch(seed, step, rank):
    return samples([seed, step, rank], BATCH)


def trained_by_one(seed):
    """All ranks' gradients added up here."""
    weights = np.zeros((FEATURES, CLASSES))
    for step in range(STEPS):
        weights -= sum(gradient(weights, *batch(seed, step, rank)) for rank in range(RANKS)) / RANKS
    return loss(weights)


def trained_by_ranks(seed):
    kept = []

    def target(rank):
        sums = Sums(rank, Tolerance(push=0.05))
        kept.append(sums)
        weights = np.zeros((FEATURES, CLASSES))
        for step in range(STEPS):
            flat = gradient(weights, *batch(seed, step, rank.rank)).ravel() / RANKS
            yield from sums.sum(flat)
            weights -= flat.reshape(weights.shape)
        return loss(weights)

    # 49 packets of 26 values a message, of which two may be lost.
    network = LossyNetwork(RANKS, Faults(loss=0.01), seed, Transport(packet_bytes=256))
    results = network.run(target)
    assert results[0] == results[1]
    assert sum(one.num_lost for one in kept) > 0
    return results[0]


def test_training_at_one_percent_loss_ends_within_the_spread_over_seeds():
    exact = [trained_by_one(seed) for seed in range(3)]
    lossy = [trained_by_ranks(seed) for seed in range(3)]
    assert exact[0] < 0.9 * np.log(CLASSES)
    assert abs(np.mean(lossy) - np.mean(exact)) < np.std(exact, ddof=1)
