"""Problems of the IOPDDL contest: read as they are, refused with one sentence where they are wrong."""

import copy
import gzip
import itertools
import json

import pytest

from shardwright import api
from shardwright.errors import InputError
from shardwright.files.iopddl import FORBIDDEN, read_iopddl, write_choice

SMALL = {
    "problem": {
        "name": "small",
        "nodes": {
            "intervals": [[0, 3], [1, 4], [2, 2], [3, 9]],
            "costs": [[4, 1], [7, 2, 5], [3], [6, 6]],
            "usages": [[1, 5], [2, 6, 3], [99], [4, 1]],
        },
        "edges": {
            "nodes": [[1, 0], [1, 3], [0, 3], [2, 1], [0, 1]],
            "costs": [
                [0, 9, 9, 0, 2, FORBIDDEN],
                [1, 2, 3, 4, 5, 6],
                [0, 8, 8, 0],
                [5, 0, 2],
                [1, 0, 1, 0, 1, 0],
            ],
        },
        "usage_limit": 9,
    }
}


def written(tmp_path, tree, name="p.json"):
    path = tmp_path / name
    data = json.dumps(tree).encode() if not isinstance(tree, bytes) else tree
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path


def by_hand(tree, choice):
    """Return (cost, peak) straight from the contest's definition."""
    nodes, edges = tree["problem"]["nodes"], tree["problem"]["edges"]
    cost = sum(row[s] for row, s in zip(nodes["costs"], choice, strict=True))
    for (a, b), table in zip(edges["nodes"], edges["costs"], strict=True):
        cost += table[choice[a] * len(nodes["costs"][b]) + choice[b]]
    used = [
        sum(
            row[s]
            for (begin, end), row, s in zip(
                nodes["intervals"], nodes["usages"], choice, strict=True
            )
            if begin <= time < end
        )
        for time in range(10)
    ]
    return cost, max(used)


@pytest.mark.parametrize("name", ["p.json", "p.json.gz"])
def test_costs_and_peaks_are_those_of_the_contest_s_definition(tmp_path, name):
    problem = read_iopddl(written(tmp_path, SMALL, name))
    for choice in itertools.product(range(2), range(3), range(1), range(2)):
        assert (problem.evaluate(choice), problem.peak(choice)) == by_hand(SMALL, choice)


def test_the_verb_finds_the_optimum_and_writes_it_as_a_list(tmp_path):
    every = itertools.product(range(2), range(3), range(1), range(2))
    best = min(c for c, peak in (by_hand(SMALL, choice) for choice in every) if peak <= 9)
    found = api.iopddl(written(tmp_path, SMALL), seconds=600)
    assert found.cost == found.bound == best
    assert found.is_optimal
    path = api.save_choice(found, tmp_path / "solution.json")
    assert path is not None
    assert by_hand(SMALL, json.loads(path.read_text()))[0] == best


def test_a_problem_without_a_limit_has_none(tmp_path):
    tree = copy.deepcopy(SMALL)
    del tree["problem"]["usage_limit"]
    found = api.iopddl(written(tmp_path, tree), seconds=600)
    every = itertools.product(range(2), range(3), range(1), range(2))
    assert found.cost == min(by_hand(tree, choice)[0] for choice in every)


@pytest.mark.parametrize("limit", [0, 1, 3, 5, 8])
def test_usages_near_the_end_of_64_bits_are_exact(tmp_path, limit):
    tree = copy.deepcopy(SMALL)
    many = 9 * 10**17 + 1  # no float; twelve of them are no integer of 64 bits
    nodes = tree["problem"]["nodes"]
    nodes["usages"] = [[many + one for one in row] for row in nodes["usages"]]
    nodes["intervals"] += [[0, 9]] * 12
    nodes["costs"] += [[1]] * 12
    nodes["usages"] += [[many]] * 12
    tree["problem"]["usage_limit"] = 15 * many + limit + 4  # three of the first are alive at once
    tree["problem"]["edges"]["costs"][0] = [0, 9, 9, 0, 2, 7]
    choices = [(*one, *[0] * 12) for one in itertools.product(range(2), range(3), [0], range(2))]
    tried = [by_hand(tree, choice) for choice in choices]
    problem = read_iopddl(written(tmp_path, tree))
    assert [(problem.evaluate(one), problem.peak(one)) for one in choices] == tried
    fitting = [cost for cost, peak in tried if peak <= tree["problem"]["usage_limit"]]
    found = api.iopddl(written(tmp_path, tree), seconds=3)
    assert found.fits == bool(fitting)
    if fitting:
        assert found.cost == min(fitting)


def test_usages_that_no_float_can_add_up_are_refused(tmp_path):
    tree = copy.deepcopy(SMALL)
    tree["problem"]["nodes"]["usages"][0] = [1, 9 * 10**17]
    tree["problem"]["usage_limit"] = 9 * 10**17
    path = written(tmp_path, tree)
    with pytest.raises(InputError, match=r"less than 2\^53.*divide all usages") as refused:
        api.iopddl(path, seconds=3)
    assert str(refused.value).startswith(f"{path}: ")


@pytest.mark.parametrize(
    "usages", [[[0, 0], [0, 2, 0], [9], [0, 0]], [[1, 0], [1, 1, 1], [0], [0, 1]]]
)
def test_a_limit_of_nothing_is_a_limit(tmp_path, usages):
    tree = copy.deepcopy(SMALL)
    tree["problem"]["nodes"]["usages"] = usages
    tree["problem"]["usage_limit"] = 0
    found = api.iopddl(written(tmp_path, tree), seconds=3)
    every = itertools.product(range(2), range(3), range(1), range(2))
    fitting = [cost for cost, peak in (by_hand(tree, one) for one in every) if peak <= 0]
    assert found.fits == bool(fitting)
    if fitting:
        assert found.cost == min(fitting)


def test_costs_near_the_forbidden_one_are_no_forbidden_ones(tmp_path):
    tree = copy.deepcopy(SMALL)
    huge = FORBIDDEN - 1
    tree["problem"]["nodes"]["costs"][1] = [huge, huge, 3 + huge // 7]
    tree["problem"]["nodes"]["costs"][0][0] = huge
    tries = [
        by_hand(tree, one) for one in itertools.product(range(2), range(3), range(1), range(2))
    ]
    fitting = [cost for cost, peak in tries if peak <= tree["problem"]["usage_limit"]]
    found = api.iopddl(written(tmp_path, tree), seconds=3)
    assert found.is_allowed
    assert by_hand(tree, found.choice) == (found.cost, found.peak)  # exact integers
    assert found.bound <= min(fitting) <= found.cost <= min(fitting) * (1 + 1e-12)


def test_a_few_huge_costs_take_no_precision_from_the_others(tmp_path):
    tree = copy.deepcopy(SMALL)
    free = api.iopddl(written(tmp_path, tree), seconds=3)
    for node, picked in enumerate(free.choice):
        row = tree["problem"]["nodes"]["costs"][node]
        row[:] = [cost if s == picked else FORBIDDEN - 9 for s, cost in enumerate(row)]
    found = api.iopddl(written(tmp_path, tree), seconds=3)
    assert (found.choice, found.cost, found.is_optimal) == (free.choice, free.cost, True)


def test_that_nothing_is_legal_is_said_and_proved(tmp_path):
    tree = copy.deepcopy(SMALL)
    tree["problem"]["nodes"]["usages"] = [[5, 5], [5, 5, 5], [5], [5, 5]]
    tree["problem"]["nodes"]["intervals"] = [[0, 2]] * 4
    tree["problem"]["usage_limit"] = 19
    found = api.iopddl(written(tmp_path, tree), seconds=3)
    assert found.is_impossible
    assert not found.is_optimal
    tree["problem"]["usage_limit"] = 20
    assert not api.iopddl(written(tmp_path, tree), seconds=3).is_impossible


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32"])
def test_other_encodings_than_that_of_json_are_refused(tmp_path, encoding):
    with pytest.raises(InputError, match=r"JSON is UTF-8|complete JSON"):
        read_iopddl(written(tmp_path, json.dumps(SMALL).encode(encoding)))


def test_a_name_s_control_characters_are_shown_not_done(tmp_path):
    tree = broken(lambda p: p.__setitem__("name", "a\x1b[31m\ud800"))
    assert read_iopddl(written(tmp_path, tree)).name == "a\\x1b[31m\\ud800"


def test_stopping_at_once_still_gives_a_complete_choice(tmp_path):
    found = api.iopddl(written(tmp_path, SMALL), seconds=60, watch=api.Watch(stop=lambda: True))
    assert by_hand(SMALL, found.choice) == (found.cost, found.peak)
    assert not found.is_complete


def broken(change):
    tree = copy.deepcopy(SMALL)
    change(tree["problem"])
    return tree


WRONG = {
    "no problem": ({}, "no object 'problem'"),
    "no edges": (broken(lambda p: p.pop("edges")), "no object 'edges'"),
    "usages short": (broken(lambda p: p["nodes"]["usages"].pop()), "every node needs one of each"),
    "strategies differ": (broken(lambda p: p["nodes"]["usages"][1].pop()), "node 1 has 3 costs"),
    "no strategy": (
        broken(lambda p: (p["nodes"]["usages"][2].clear(), p["nodes"]["costs"][2].clear())),
        "node 2 has 0 costs",
    ),
    "negative usage": (broken(lambda p: p["nodes"]["usages"].__setitem__(2, [-1])), "negative"),
    "float cost": (
        broken(lambda p: p["nodes"]["costs"].__setitem__(2, [0.5])),
        "has 0.5, which is not an integer",
    ),
    "text cost": (
        broken(lambda p: p["nodes"]["costs"].__setitem__(2, ["x"])),
        "has 'x', which is not",
    ),
    "true cost": (broken(lambda p: p["nodes"]["costs"].__setitem__(2, [True])), "not an integer"),
    "huge cost": (
        broken(lambda p: p["nodes"]["costs"].__setitem__(2, [2**70])),
        f"has {2**70}, which is not",
    ),
    "nested cost": (broken(lambda p: p["edges"]["costs"].__setitem__(3, [[1], 2, 3])), "integer"),
    "wrong table": (broken(lambda p: p["edges"]["costs"][2].pop()), "edge 2 has 3 costs"),
    "tables short": (broken(lambda p: p["edges"]["costs"].pop()), "5 edges, but 4 tables"),
    "unknown node": (broken(lambda p: p["edges"]["nodes"].__setitem__(0, [0, 4])), "outside of 0"),
    "self": (broken(lambda p: p["edges"]["nodes"].__setitem__(0, [1, 1])), "itself"),
    "not a pair": (broken(lambda p: p["nodes"]["intervals"].__setitem__(0, [1])), "not a pair"),
    "long ago": (broken(lambda p: p["nodes"]["intervals"].__setitem__(0, [-1, 2])), "negative"),
    "limit text": (broken(lambda p: p.__setitem__("usage_limit", "9")), "usage_limit"),
    "cut": (b'{"problem": {', "complete JSON"),
    "bytes": (b"\x1f\x8bnot gzip", "its gzip stream is damaged"),
}


@pytest.mark.parametrize(("tree", "reason"), WRONG.values(), ids=WRONG.keys())
def test_a_file_that_is_wrong_is_refused_with_what_is_wrong(tmp_path, tree, reason):
    with pytest.raises(InputError, match=reason) as refused:
        read_iopddl(written(tmp_path, tree))
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(InputError, match="cannot read"):
        read_iopddl(tmp_path / "none.json")


def test_a_written_choice_reads_back(tmp_path):
    assert json.loads(write_choice(tmp_path / "s.json", (0, 2, 1)).read_text()) == [0, 2, 1]
