"""The page: one file, no network, everything on it, and no name becomes markup."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from shardwright.core.plan import Frontier
from shardwright.core.program import Kind
from shardwright.report.html import page_text
from shardwright.report.reasons import why_parts
from shardwright.report.story import PlanStory, Story
from shardwright.report.text import chosen_lines

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


def test_the_page_draws_the_order_of_a_pipeline_that_is_chosen(story: Story) -> None:
    page = page_text(story)
    program = story.plans[story.chosen].program
    names = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward"}
    wanted = {
        (names[kind], str(microbatch), str(mesh))
        for kind, microbatch, mesh in zip(
            program.kind, program.microbatch, program.group, strict=True
        )
        if kind in names
    }
    drawn = re.findall("<title>(.*?) of microbatch (.*?) on stage (.*?)</title>", page)
    assert wanted
    assert sorted(drawn) == sorted(wanted)


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


def words_of(story: PlanStory) -> list[str]:
    """Every word that speaks for a plan."""
    found = story.why
    assert found is not None
    tables = [table for table in (found.decisions, found.critical) if table is not None]
    cells = [cell for table in tables for row in table.rows for cell in row]
    titles = [word for table in tables for word in (table.title, *table.heads, table.caption)]
    return [word for word in (found.bound, *found.prices, *found.notes, *titles, *cells) if word]


def test_the_page_and_the_terminal_give_the_same_reasons(story: Story) -> None:
    plans = json.loads(read(page_text(story)).data)["plans"]
    assert plans[0]["why"]["decisions"]["rows"][0][2] == "n over data"
    assert plans[1]["why"]["decisions"] is None
    for told, plan in zip(story.plans, plans, strict=True):
        assert told.why is not None
        console = Console(width=400, no_color=True)
        with console.capture() as captured:
            console.print(chosen_lines(Frontier(plans=(told.plan,))), why_parts(told.why, 99))
        page = json.dumps(plan["why"], ensure_ascii=False)
        for word in words_of(told):
            assert word in captured.get(), word
            assert word in page, word


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
    assert "Why this plan" in shown
    for word in words_of(story.plans[0]):
        assert html.escape(word, quote=False) in shown, word


@needs_browser
def test_a_browser_shows_hostile_names_as_text(hostile_story: Story, tmp_path: Path) -> None:
    shown = opened(page_text(hostile_story), tmp_path)
    assert 'data-ready="1"' in shown
    assert "<img" not in shown
    assert "<title>broken" not in shown
