"""The book of the real lessons: it builds without a warning, needs no network, and what it links to is there."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

pytestmark = pytest.mark.slow

FETCHED = {"script": "src", "img": "src", "source": "src", "iframe": "src", "link": "href", "object": "data"}
WIDGET = "application/vnd.jupyter.widget-view+json"


class Page(HTMLParser):
    """What a page links to, what it fetches, and the places in it that a link can name."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.anchors: set[str] = {""}
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.anchors |= {found[name] for name in ("id", "name") if found.get(name)}
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])
        if url := found.get(FETCHED.get(tag, "")):
            self.fetched.append(url)


@pytest.fixture(scope="module")
def pages(book) -> dict[Path, Page]:
    return {path.resolve(): Page(path) for path in book.pages}


def test_every_lesson_ran_and_has_a_page_and_sphinx_had_nothing_to_say(book):
    assert [lesson.failure for lesson in book.lessons if lesson.failure] == []
    assert book.warnings == ""
    names = {path.relative_to(book.folder).as_posix() for path in book.pages}
    lessons = {f"notebooks/{lesson.name}.html" for lesson in book.lessons}
    assert names == lessons | {"index.html", "search.html", "docs/glossary.html", "docs/lecturers.html"}


def test_every_link_leads_to_a_page_and_a_place_that_are_there(pages):
    followed = 0
    for path, page in pages.items():
        for link in page.links:
            url = urlsplit(link)
            if url.scheme:
                assert url.scheme == "https", (path.name, link)
                continue
            target = (path.parent / unquote(url.path)).resolve() if url.path else path
            assert target.exists(), (path.name, link)
            assert target not in pages or unquote(url.fragment) in pages[target].anchors, (path.name, link)
            followed += 1
    assert followed > 500


def test_nothing_is_fetched_from_a_network(book, pages):
    for path, page in pages.items():
        for url in page.fetched:
            if not url.startswith("data:"):
                assert not urlsplit(url).netloc, (path.name, url)
                assert (path.parent / unquote(urlsplit(url).path)).exists(), (path.name, url)
    for style in [*book.folder.rglob("*.css"), *book.pages]:
        text = style.read_text(encoding="utf-8")
        assert not re.search(r"url\([\"']?(?:https?:)?//|@import", text), style.name


def test_the_index_says_of_every_lesson_when_it_ran_and_shows_the_ladder(book):
    html = book.page("index")
    for lesson in book.lessons:
        assert f'href="notebooks/{lesson.name}.html"' in html
        assert lesson.state in html
        assert lesson.state in book.page(f"notebooks/{lesson.name}")
    assert re.search(r"<td[^>]*><p>token_by_token</p></td>\n<td[^>]*><p>1.00e-03</p></td>", html)


def test_every_widget_has_its_twin_of_picture_and_text(book):
    for lesson in book.lessons:
        widgets = sum(
            WIDGET in output.get("data", {}) for cell in lesson.notebook.cells for output in cell.get("outputs", ())
        )
        html = book.page(f"notebooks/{lesson.name}")
        twins = html.split('<div class="widget">')[1:]
        assert len(twins) == widgets
        for twin in twins:
            assert re.match(r'(?:<style>[^<]*</style>)*<img [^>]*alt="[^"]{40,}"', twin)
            assert re.search(r'role="status"[^>]*>[^<]{40,}<', twin)
            assert "make lab" in twin
    explorers = ("02_rebased_ex2", "03_factored", "04_fused_one_kernel", "05_fused_two_kernel", "07_reading_nsight")
    for name in explorers:
        assert 'class="widget"' in book.page(f"notebooks/{name}")


def test_formulas_are_mathml_with_nothing_left_over(book):
    formulas = 0
    for path in book.pages:
        html = re.sub(r"<(script|style|pre)\b.*?</\1>", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        formulas += html.count("<math ")
        assert not re.search(r"<mi>(?:&amp;|&|\\\w*)</mi>|<merror|\\begin\{|\\text", html), path.name
        text = re.sub(r"<code.*?</code>|<[^>]*>", "", html, flags=re.DOTALL)
        assert not re.search(r"\$[A-Za-z\\({][^$\n]*\$", text), path.name
    assert formulas > 50


@pytest.mark.browser
def test_search_finds_a_word_without_a_network(browser, book):
    context = browser.new_context(offline=True)
    page = context.new_page()
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("requestfailed", lambda request: complaints.append(request.url))
    page.goto((book.folder / "index.html").as_uri())
    page.get_by_role("textbox", name="Search").fill("occupancy")
    page.keyboard.press("Enter")
    result = page.locator("ul.search li a", has_text="Glossary").first
    result.wait_for(timeout=20_000)
    result.click()
    assert page.get_by_role("heading", level=1).inner_text().startswith("Glossary")
    assert complaints == []
    context.close()
