"""The page: one file, no network, everything on it, and no name becomes markup."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from shardwright.report.html import page_text
from shardwright.report.story import Story

CHROMIUM = next(
    (p for p in ("/usr/bin/chromium", shutil.which("chromium") or "") if Path(p).is_file()), ""
)
needs_browser = pytest.mark.skipif(
    not CHROMIUM, reason="no chromium at /usr/bin/chromium to open the page"
)


class Reader(HTMLParser):
    """Collects tags, addresses and the data block."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.data = ""
        self._in_data = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]
        self._in_data = ("id", "data") in attrs

    def handle_data(self, data: str) -> None:
        if self._in_data:
            self.data += data
            self._in_data = False


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    return reader


def test_the_page_is_one_small_file_without_addresses(story: Story) -> None:
    page = page_text(story)
    assert len(page.encode()) < 6 * 10**6
    assert read(page).addresses == []


def test_the_data_block_holds_every_plan(story: Story) -> None:
    data = json.loads(read(page_text(story)).data)
    assert [plan["label"] for plan in data["plans"]] == ["model plan 0", "model plan 1"]
    assert [name for name, *_ in data["plans"][0]["timelines"]] == ["simulated", "measured"]
    assert data["plans"][0]["operators"][0][5] == 3
    assert data["losses"][0] == ["this plan", [3.0, 2.5, 2.1]]


def test_the_frontier_can_be_read_without_the_script(story: Story) -> None:
    page = re.sub(r"<script.*?</script>", "", page_text(story), flags=re.DOTALL)
    for words in ("model plan 0", "5.00 s ± 200 ms", "9.00 MiB", "$0.002", "measured 80%"):
        assert words in page


def test_hostile_names_add_no_tag(story: Story, hostile_story: Story) -> None:
    assert read(page_text(hostile_story)).tags == read(page_text(story)).tags


def test_equal_stories_give_equal_pages(story: Story) -> None:
    assert page_text(story) == page_text(story)


def opened(page: str, folder: Path) -> str:
    """Return the document after its script ran in a real browser."""
    path = folder / "page.html"
    path.write_text(page)
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000",
        f"--user-data-dir={folder}/profile", "--dump-dom", path.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
    return re.sub(r"<script.*?</script>", "", done.stdout, flags=re.DOTALL)


@needs_browser
def test_a_browser_draws_every_chart(story: Story, tmp_path: Path) -> None:
    shown = opened(page_text(story), tmp_path)
    assert 'data-ready="1"' in shown
    for chart in ("frontier", "timeline", "memory", "parts", "loss"):
        start = shown.index(f'id="c-{chart}"')
        assert "main-svg" in shown[start : start + 4000], chart
    assert "h.*.up" in shown


@needs_browser
def test_a_browser_shows_hostile_names_as_text(hostile_story: Story, tmp_path: Path) -> None:
    shown = opened(page_text(hostile_story), tmp_path)
    assert 'data-ready="1"' in shown
    assert "<img" not in shown
    assert "<title>broken" not in shown
