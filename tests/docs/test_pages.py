"""Links lead somewhere, generated parts are fresh, and everything public is explained."""

import importlib
import inspect
import pkgutil
import re

import pytest

import shardwright
from shardwright import errors
from shardwright.core import cluster, costs, graph, plan, program, strategy, timeline
from shardwright.verbs import request
from tests.docs.pages import PAGES, ROOT, load_generator, name_of

LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
NOUN_MODULES = (graph, cluster, costs, strategy, program, timeline, plan)


def headings(path):
    """Anchors as code hosts make them from headings."""
    lines = re.findall(r"^#+ (.+)$", path.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_resolve(page):
    for target in LINK.findall(page.read_text()):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        assert path.exists(), f"{name_of(page)} links to {target}"
        assert not anchor or anchor in headings(path), f"{name_of(page)} links to {target}"


def test_the_command_line_page_is_fresh():
    make = load_generator()
    page = make.CLI_PAGE.read_text()
    assert page == make.cli_page(page), "run `make docs`"


def nouns():
    """Classes of the core, those that a room offers by name, and what verbs are asked with."""
    for module in (*NOUN_MODULES, request):
        for name, value in vars(module).items():
            if inspect.isclass(value) and value.__module__ == module.__name__ and name[0] != "_":
                yield name
    for room in pkgutil.walk_packages(shardwright.__path__, "shardwright."):
        module = importlib.import_module(room.name) if room.ispkg else None
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            if inspect.isclass(value) and not issubclass(value, Exception):
                yield name


@pytest.mark.torch
def test_every_noun_has_a_glossary_entry():
    text = (ROOT / "docs" / "glossary.md").read_text()
    known = set(re.findall(r"\*\*`(\w+)`\*\*", text))
    assert not sorted({*nouns(), "Executor", "Store"} - known)
    twice = [name for name in known if len(re.findall(rf"\*\*`{name}`\*\*", text)) > 1]
    assert not twice


@pytest.mark.parametrize("name", shardwright.__all__)
def test_every_public_name_is_in_the_reference(name):
    text = (ROOT / "docs" / "reference" / "api.md").read_text()
    assert re.search(rf"^###? .*`{name}\b", text, flags=re.MULTILINE)


@pytest.mark.parametrize(
    "name", [name for name, value in vars(errors).items() if inspect.isclass(value)]
)
def test_every_error_is_explained(name):
    assert f"## {name}" in (ROOT / "docs" / "reference" / "errors.md").read_text()


def test_every_decision_is_listed_and_says_what_was_rejected():
    folder = ROOT / "docs" / "decisions"
    listed = (ROOT / "docs" / "index.md").read_text()
    for page in sorted(folder.glob("*.md")):
        assert f"decisions/{page.name}" in listed
        text = page.read_text()
        assert all(
            f"## {part}" in text for part in ("Context", "Decision", "Consequences", "Rejected")
        )


def test_every_concept_page_says_when_it_is_wrong():
    for page in (ROOT / "docs" / "concepts").glob("*.md"):
        assert "## When this model is wrong" in page.read_text(), page.name


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
