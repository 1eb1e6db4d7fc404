"""One fork server for all tests of a process: who starts it first decides what it has imported."""

import pytest

from tests.runtime.world import serve


@pytest.fixture(autouse=True)
def served() -> None:
    serve()
