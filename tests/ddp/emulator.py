"""P workers that compress gradients, in NumPy and float64: one array per worker and parameter.

Written from the papers, apart from the code under test; the state is what callers pass in again.
"""

from __future__ import annotations

import numpy as np


def top(dense, k):
    """Zero all but the k of largest magnitude."""
    kept = np.zeros_like(dense)
    order = np.argsort(-np.abs(dense), kind="stable")[:k]
    kept[order] = dense[order]
    return kept


def merge_into(sets, owed, low, high, k, owner):
    """Worker ``low`` gets the k largest of the sum; ``owner`` owes the rest."""
    total = sets[low] + sets[high]
    kept = top(total, k)
    if owner is not None:
        owed[owner] += total - kept
    return kept


def tree(sets, owed, k):
    stride, workers = 1, len(sets)
    while stride < workers:
        for low in range(0, workers - stride, 2 * stride):
            sets[low] = merge_into(sets, owed, low, low + stride, k, low)
        stride *= 2
    return sets[0]


def doubling(sets, owed, k):
    """Of what is dropped everyone takes back its own share, and that of who handed its own over."""
    workers, power = len(sets), 1
    while 2 * power <= len(sets):
        power *= 2
    for extra in range(power, workers):
        sets[extra - power] = merge_into(sets, owed, extra - power, extra, k, extra - power)
    shares = [one.copy() for one in sets[:power]]
    stride = 1
    while stride < power:
        for first in range(0, power, 2 * stride):
            merged = merge_into(sets, owed, first, first + stride, k, None)
            for member in range(first, first + 2 * stride):
                sets[member] = merged
                owed[member] = owed[member] + np.where(merged == 0, shares[member], 0)
                shares[member] = np.where(merged == 0, 0, shares[member])
        stride *= 2
    return sets[0]


def g_top_k(inputs, k, merge, rule):
    chosen = [top(one, k) for one in inputs]
    owed = [one - sent for one, sent in zip(inputs, chosen)]
    nowhere = [np.zeros_like(one) for one in inputs]
    final = merge([one.copy() for one in chosen], owed if rule == "conserving" else nowhere, k)
    if rule == "paper":
        owed = [rest + np.where(final == 0, sent, 0) for rest, sent in zip(owed, chosen)]
    return final / len(inputs), owed


def all_gathered(inputs, compress):
    sent = [compress(one) for one in inputs]
    return sum(sent) / len(inputs), [one - given for one, given in zip(inputs, sent)]


def int8(dense):
    scale = np.abs(dense).max() / 127
    return np.rint(dense / scale) * scale


def one_bit(dense):
    below = dense < 0
    means = [
        dense[~below].mean() if (~below).any() else 0.0,
        dense[below].mean() if below.any() else 0.0,
    ]
    return np.where(below, means[1], means[0])


def power_sgd(inputs, right):
    """Inputs are matrices; returns also the next right factor."""
    basis = np.linalg.qr(right)[0]
    left = np.linalg.qr(sum(one @ basis for one in inputs))[0]
    right = sum(one.T @ left for one in inputs) / len(inputs)
    mean = left @ right.T
    return mean, [one - mean for one in inputs], right


def step(method, inputs, k, rule="conserving"):
    """Return the mean that is applied and what each worker owes, of flat inputs (gradient + residual)."""
    if method == "top-k":
        return all_gathered(inputs, lambda one: top(one, k))
    if method == "gtop-k":
        return g_top_k(inputs, k, doubling, rule)
    if method == "gtop-k-tree":
        return g_top_k(inputs, k, tree, rule)
    return all_gathered(inputs, {"int8": int8, "1-bit": one_bit}[method])
