"""Settings for every test."""

import gc
import os
import signal
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from tests.runtime.captures import FOLDER

# As seldom as the command line does while it searches: often takes a tenth, of importing torch a fifth.
gc.set_threshold(500_000, 10, 10)
# No time limit per example: the first one may compile a kernel, and machines differ.
EXAMPLES = 300 if "SHARDWRIGHT_LAWS" in os.environ else 40
settings.register_profile("shardwright", deadline=None, max_examples=EXAMPLES)
settings.load_profile("shardwright")


@pytest.fixture(scope="module")
def short_climbs() -> Iterator[None]:
    """Climbs as short as they may be, and two candidates where nobody says how many, for tests of anything
    but how far a search comes: both are half of a small one. All of a file, since its tests share answers."""
    from shardwright.planner.search import Limits
    from shardwright.planner.search.proposers import refine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(refine, "MOVES", refine.LEAST_MOVES)
        patch.setitem(Limits.__init__.__kwdefaults__, "max_candidates", 2)
        yield


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Whoever starts the fork server first decides what it has imported."""
    if item.get_closest_marker("ranks"):
        from tests.runtime.world import serve

        serve()


class OneWorkerCaptures(LoadFileScheduling):
    """Hands out files, and the laws together: they train the same models, and capturing one takes as long as
    training it by some five strategies."""

    def _split_scope(self, nodeid: str) -> str:
        return "tests/laws" if nodeid.startswith("tests/laws/") else super()._split_scope(nodeid)


@pytest.hookimpl(optionalhook=True)  # unknown where one process runs all
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> OneWorkerCaptures:
    return OneWorkerCaptures(config, log)


def pytest_configure(config: pytest.Config) -> None:
    """Let signals end what tests start, also where the tests run in the background or under nohup; and let all
    processes of this run share what they capture."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if FOLDER not in os.environ:  # else this is a worker of the run
        folder = tempfile.TemporaryDirectory(prefix="captures-")
        os.environ[FOLDER] = folder.name
        config.add_cleanup(folder.cleanup)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files whose tests take long, so that no worker is left with one of them alone."""
    marked = ("ranks", "slow")
    long = {item.path for item in items if any(item.get_closest_marker(one) for one in marked)}
    items.sort(key=lambda item: item.path not in long)


def pytest_collection_finish() -> None:
    """Let collections of garbage leave alone what all tests share: torch and the tests themselves."""
    gc.freeze()
