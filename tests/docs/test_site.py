"""
# The site: it is built whole, its checks find what is wrong, and a browser can use it
"""

import contextlib
import dataclasses
import functools
import json
import os
import re
import shutil
import time
from functools import partial

import pytest

pytest.importorskip("pygments", reason="the libraries of the site are not installed")
pytest.importorskip("markdown_it", reason="the libraries of the site are not installed")

from pygments.lexers import PythonLexer

from docs import (
    build,
    compiled,
    contents,
    example,
    figures,
    ladder,
    lanes,
    layouts,
    tape,
    timelines,
)
from docs.annotate import Lexer, Names, Source

# What `Figures` runs. The tests of these files look at the same runs.
RECORDED = {"tapes": (tape, "recordings"), "ladder": (ladder, "climb"),
            "layouts": (layouts, "record"), "example": (example, "record"),
            "timelines": (timelines, "record"), "lanes": (lanes, "record"),
            "compiled": (compiled, "record")}
WIDE, PHONE = (1280, 900), (375, 800)


@pytest.fixture(scope="module", autouse=True)
def read_once():
    """Several sites are made of the same sources, and to cut these up takes most of the time."""
    source = functools.cache(lambda path: Source(build.ROOT / path, build.page_of(path)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build.Site, "source", lambda site, path: source(path))
        yield


@pytest.fixture(scope="module")
def measured(once):
    """What the site runs to be built, once."""
    with pytest.MonkeyPatch.context() as patch:
        for name, (module, record) in RECORDED.items():
            patch.setattr(module, record, partial(once, name, getattr(module, record)))
        return figures.Figures()


@pytest.fixture(scope="module")
def site(measured, tmp_path_factory):
    """The site in a folder, built as `make docs` builds it."""
    out = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "Figures", lambda: measured)
        assert build.main(["--out", str(out)]) == 0
    return out


# ------------------------------------------------------------------------------------------ pages


def test_every_file_has_a_page_and_every_line_is_on_it_once(site):
    """
    Of the package, the tests and the site's own source. Breaks where a row loses a line between two
    comments.
    """
    for folder in ("zero3", "tests", "docs"):
        for path in (build.ROOT / folder).glob("*.py"):
            if path.stat().st_size:
                html = (site / build.page_of(f"{folder}/{path.name}")).read_text()
                source = build.Site.source(None, f"{folder}/{path.name}")
                lines = [str(number) for row in source.rows for number in row.lines]
                assert sorted(re.findall(r' id="L(\d+)"', html)) == sorted(lines), path
                assert html.count('<span class="line"') == len(lines) == len(set(lines))


def test_a_file_is_cut_into_prose_and_code(tmp_path):
    """
    A docstring stands beside the lines of its function, with the decorator; a comment beside those
    that follow it; and one at the end of a line stays there.
    """
    path = tmp_path / "one.py"
    path.write_text('"""\n# Title\n"""\n\nx = 1  # at the end\n# why\n# so\ny = 2\n\n\n@z\n'
                    'def f():\n    """\n    ## Heading, too\n    """\n    # here\n    return x\n')
    rows = [(row.prose, row.anchor, row.lines) for row in Source(path).rows]
    assert rows == [("# Title", "title", [5]), ("why\nso", "", [8]),
                    ("## Heading, too", "heading-too", [11, 12]), ("here", "", [17])]


def test_the_lexer_finds_the_tokens_that_pygments_finds():
    """
    In two files, and where a sign is part of a longer one, of a number, or of a string, and a space
    of a docstring. Breaks if one of the first rules takes what belongs to a later one.
    """
    texts = [(build.ROOT / path).read_text() for path in ("docs/annotate.py", "zero3/flat.py")]
    texts.append('def f(x, *, y: int = .5) -> None:\n    """Doc: [1.5], {2}."""\n'
                 '    if (n := x[1:2, ...]) == y or f"{x:>{n}}, {y!r:=^3}" != (a.b . c): pass\n'
                 "    match x:\n        case [1, {'k': .5e3}]: return x[::-1], x == y, 1.\n"
                 "from .a import (b,\n  c)\n@d.e\nclass A(B): u = \\\n  1\n\t'''also'''\n\f\n")
    for text in texts:
        found, expected = (list(lexer(stripnl=False, ensurenl=False).get_tokens(text))
                           for lexer in (Lexer, PythonLexer))
        assert found == expected


def test_a_row_of_a_wide_table_says_its_columns():
    """
    Each cell but the first names its column, for a phone; an empty cell stays empty.
    """
    table = ("<table><tr><th>a</th><th><code>b</code></th><th>c</th></tr>"
             "<tr><td>1</td><td>2</td><td></td></tr></table>")
    assert build.cards(table).endswith(
        '<tr><td>1</td><td data-head="b"><span>2</span></td><td></td></tr></table>')


def test_names_in_code_lead_to_what_they_name(tmp_path):
    """
    A name of the file, an imported one, a method of `self`, one of a module; not an argument of the
    same name, and not a method that two classes have.
    """
    (tmp_path / "one.py").write_text("class A:\n    def go(self):\n        return self.go\n\n\n"
                                     "class B:\n    def stop(self): pass\n\n\n"
                                     "class C:\n    def stop(self): pass\n")
    (tmp_path / "two.py").write_text("from zero3.one import A\nfrom zero3 import one\n\n\n"
                                     "def f(f, x):\n    f, x.go, x.stop, one.A, A\n\n\nf\n")
    sources = [Source(tmp_path / f"{name}.py", f"{name}.html") for name in ("one", "two")]
    names = Names(sources)
    assert names.links(sources[0]) == {(3, 20): "#L2"}
    assert names.links(sources[1]) == {
        (6, 9): "one.html#L2", (6, 25): "one.html#L1", (6, 28): "one.html#L1", (9, 0): "#L5"}
    assert names.find("go") == ("one", "A.go") and names.find("stop") is None
    # A test has names of its own, and those of the package.
    (tmp_path / "test_x.py").write_text("from zero3.one import A\n\n\ndef f(): A\n\n\nf\n")
    assert names.links(Source(tmp_path / "test_x.py", "x.html")) == {
        (4, 9): "one.html#L1", (7, 0): "#L4"}


def test_each_file_has_a_name_of_its_own(tmp_path):
    """
    Also the command line of a folder in which another file has the folder's name, and a folder's
    `__init__`. Breaks if one of them takes the place of the other in `Names`.
    """
    files = [tmp_path / f"{path}.py" for path in ("zero3/__init__", "zero3/a/__init__",
                                                  "zero3/a/__main__", "zero3/a/a",
                                                  "zero3/b/__main__")]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("def f():\n    pass\n")
    keys = [Source(file) for file in files]
    assert [source.key for source in keys] == ["__init__", "a.__init__", "a.__main__", "a", "b"]
    names = Names(keys)
    assert names.find("a.f") == ("a", "f") and names.find("b.f") == ("b", "f")


def test_a_section_leads_to_its_tests_and_they_lead_back(site):
    """Breaks where a test's last words are not read."""
    heart, tests = (site / "layer.html").read_text(), (site / "test_bytes.html").read_text()
    name = "test_the_next_layer_is_fetched_before_this_one_computes"
    section = heart[heart.index('id="walk-the-layers-one-all-gather-ahead"') :]
    assert f'href="test_bytes.html#{name}"' in section[: section.index("</section>")]
    assert 'href="layer.html#walk-the-layers-one-all-gather-ahead"' in tests[tests.index(name) :]


# ------------------------------------------------------------------------------------------- path


def linked(html, rel):
    found = re.search(rf'<a rel="{rel}" href="([^"]+)"', html)
    return found[1] if found else ""


def test_the_path_leads_through_the_nine_chapters(site):
    """
    From the index through the pages that all readers need to the further chapters and the appendix,
    and back. Breaks where a footer leads into the pages for those who want more.
    """
    order = [build.page_of(item.path) for each in contents.PATH for item in each.path]
    page, seen = "index.html", []
    while page not in seen:
        seen.append(page)
        after = linked((site / page).read_text(), "after")
        if page in order:
            assert linked((site / page).read_text(), "before") == seen[-2]
        page = after or page
    assert seen[1 : len(order) + 1] == order
    assert order[2:9] == ["minimal.html", "tape.html", "layer.html", "flat.html", "watch.html",
                          "sharded.html", "comm-collectives.html"]
    assert {build.page_of(path) for path in contents.sources()} - set(seen) == {
        build.page_of(item.path) for each in contents.PATH for item in each.more
        if item.path.endswith(".py")}


def test_a_page_for_more_leads_through_its_chapter_and_on_to_the_next(site):
    """The other files of communication, its notebook, then the optimizer. Breaks in a circle."""
    page = "comm-reducer.html"
    seen = []
    while page != "optimizer-stage3.html":
        seen.append(page)
        page = linked((site / page).read_text(), "after")
    assert seen == ["comm-reducer.html", "comm-order.html", "comm-leaving.html",
                    "02_collectives.html"]
    assert linked((site / "comm-reducer.html").read_text(), "before") == "comm-collectives.html"


def test_each_page_shows_its_place(site):
    """
    The chapter's number, and minutes that add up: what is left after a page are the pages after it,
    in hours if they are many. In the sidebar this page, and no other, is the current one.
    """
    minutes, left = [], []
    for i, chapter in enumerate(contents.PATH, 1):
        for item in chapter.path:
            html = (site / build.page_of(item.path)).read_text()
            place = re.sub("<[^>]*>", "", re.search('<p class="place">(.*?)</p>', html)[1])
            assert place.startswith(f"Chapter {i} of {len(contents.PATH)}: {chapter.name} · ")
            minutes.append(int(re.search(r"· (\d+) min", place)[1]))
            left.append((re.search(r"then (.*) to the end", place) or ["", ""])[1])
            side = html[html.index('<nav class="side"') : html.index("<main")]
            assert side.count('aria-current="page"') == 1
    rest = [sum(minutes[i:]) for i in range(1, len(minutes))]
    assert left == [*(f"{each} min" if each < 90 else f"about {each / 60:.0f} hours"
                      for each in rest), ""]
    place = re.search('<p class="place">(.*?)</p>', (site / "watch.html").read_text())[1]
    assert "page 3 of 4" in place
    place = re.search('<p class="place">(.*?)</p>', (site / "gradients.html").read_text())[1]
    assert "More in chapter 5" in place and "then" not in place


def test_the_tables_come_from_the_list(monkeypatch):
    """
    In the README and in `zero3/__init__.py`. Breaks where a table is typed.
    """
    for path in contents.TABLES:
        assert (build.ROOT / path).read_text() == contents.with_tables(path)
    first, *more = contents.PATH
    item = contents.Item("zero3/layer.py", "something else")
    other = dataclasses.replace(first, items=(item, *first.items))
    monkeypatch.setattr(contents, "PATH", (other, *more))
    assert "| 1 | `layer.py` | something else |" in contents.with_tables("zero3/__init__.py")
    monkeypatch.setitem(contents.TABLES, "README.md", {"| not there |\n": contents.rows})
    with pytest.raises(ValueError, match=r"README.md lacks a table\. Expected: "):
        contents.with_tables("README.md")


def test_a_page_outside_of_path_and_appendix_ends_the_build(measured, monkeypatch):
    """And so does a table that is not that of the list."""
    *others, last = contents.PATH
    shorter = dataclasses.replace(last, items=last.items[:1], core=1)
    monkeypatch.setattr(contents, "PATH", (*others, shorter))
    site = build.Site(measured)
    site.problems.clear()
    site.check({})
    for name in ("zero3/optimizer/buckets.py", "notebooks/06_optimizer.ipynb"):
        assert f"{name} is neither on the path nor in the appendix" in site.problems
    assert any(said.startswith("README.md: its table is not that of") for said in site.problems)


# ----------------------------------------------------------------------------------------- checks


def test_what_cannot_be_trusted_ends_the_build(measured, monkeypatch, tmp_path, capsys):
    """
    A dead link, a dead anchor, an anchor that is there twice, a formula that does not parse, a
    section without a test, a test of nothing, a heading that skips a level; nothing is written.
    """
    site = build.Site(measured)
    good = '<h1 id="here"></h1><a href="#here"></a><a href="https://example.org"></a>'
    found = []
    for pages in ({"a.html": good + '<a href="gone.html"></a>'},
                  {"a.html": good + '<img src="gone.png">'},
                  {"a.html": good + '<script src="https://example.org/x.js"></script>'},
                  {"a.html": good + "<a href='gone'></a>"},
                  {"a.html": good + '<a href="#gone"></a>'},
                  {"a.html": good + '<p id="here"></p>'}, {"a.html": good + "<h2></h2><h4></h4>"},
                  {"a.html": good}):
        site.problems.clear()
        site.check(pages)
        found.append(site.problems[-1] if site.problems else "")
    assert found == ["a.html: a link to gone.html leads nowhere",
                     "a.html: a link to gone.png leads nowhere",
                     "a.html: a link to https://example.org/x.js leads nowhere",
                     "a.html: a link to gone leads nowhere",
                     "a.html: a link to #gone leads nowhere",
                     "a.html: the anchor #here occurs 2 times",
                     "a.html: a heading skips a level: [1, 2, 4]", ""]
    for tex in (r"\notacommand{x}", r"\frac{1}", r"\left( x"):
        site.prose(f"${tex}$", "README.md")
        assert site.problems.pop() == f"a formula does not parse: {tex}"
    layer = next(source for source in site.chapters if source.path.name == "layer.py")
    site.proofs.pop(("layer", "Zero3Layer.fetch_params"))
    site.check({})
    assert site.problems.pop() == "layer.py: no test proves `Zero3Layer.fetch_params`"
    assert layer.sections["Zero3Layer.fetch_params"].level == 3
    monkeypatch.setattr(build, "Figures", lambda: measured)
    monkeypatch.setattr(build.Site, "build", lambda site: {"a.html": '<a href="gone"></a>'})
    assert build.main(["--out", str(tmp_path / "site")]) == 1
    assert "leads nowhere" in capsys.readouterr().out and not (tmp_path / "site").exists()


def test_a_folder_that_is_no_site_is_left_alone(measured, monkeypatch, tmp_path):
    """Breaks where whatever is there is cleared away for the site."""
    (tmp_path / "mine.txt").write_text("mine")
    monkeypatch.setattr(build, "Figures", lambda: measured)
    monkeypatch.setattr(build.Site, "build", lambda site: {})
    monkeypatch.setattr(build.Site, "check", lambda site, pages: None)
    with pytest.raises(SystemExit):
        build.main(["--out", str(tmp_path)])
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_a_line_that_is_in_no_row_ends_the_build(tmp_path, monkeypatch):
    """Breaks where `Source` trusts its own cut."""
    path = tmp_path / "one.py"
    path.write_text("x = 1\ny = 2\n")
    assert len(Source(path).rows) == 1
    monkeypatch.setattr("docs.annotate._comments", lambda text: [(1, ["# y"])])
    with pytest.raises(ValueError, match="line 1 is on the page 0 times"):
        Source(path)


def test_a_timing_of_code_that_has_changed_is_refused(measured, monkeypatch, tmp_path):
    """
    A comment may change, a line may not. Breaks where figures outlive what they are of.
    """
    path = tmp_path / "one.py"
    path.write_text('"""Old."""\nx = 1\n')
    before = Source(path).digest()
    path.write_text('"""\nNew.\n"""\n# and why\n\nx = 1\n')
    assert Source(path).digest() == before
    path.write_text('"""Old."""\nx = 2\n')
    assert Source(path).digest() != before
    assert measured.speed() and not measured.problems
    told = (figures.HERE / "bench.json").read_text()
    digest = Source(build.ROOT / "zero3/layer.py").digest()
    assert digest in told
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/bench.json").write_text(told.replace(digest, "0" * 16))
    (tmp_path / "zero3").symlink_to(build.ROOT / "zero3")
    monkeypatch.setattr(figures, "HERE", tmp_path / "docs")
    measured.speed()
    said = measured.problems.pop()
    assert said.startswith("bench.json: zero3/layer.py changed since it was timed")


def test_a_figure_without_a_run_ends_the_build(measured):
    """
    A drawing says the commit that it was recorded at, or that it is calculated. Breaks where a
    drawing may be made by hand.
    """
    site = build.Site(measured)
    site.problems.clear()
    for caption in ("2 ranks, CPU, torch 2.13.0, commit 0123abc", "from the formulas of ZeRO"):
        site.check({"a.html": f"<figure>{caption}</figure>"})
    assert not any("figure" in said for said in site.problems)
    site.check({"a.html": "<figure class=drawn>by hand</figure>"})
    assert site.problems[-1].startswith("a.html: a figure does not say which run it is from: ")


def test_a_figure_stands_behind_the_words_that_it_illustrates(measured, monkeypatch):
    """
    Behind the paragraph or the table. If the words are gone, the build ends. Breaks where a figure
    is lost when its text is rewritten.
    """
    monkeypatch.setattr(figures, "PLACED", (("one.py", "f", "so far", "tape.caption"),))
    html = "<p>first</p><p>so far</p><p>last</p>"
    caption = measured.values["tape.caption"]
    assert measured.place("one.py", "f", html) == html.replace("far</p>", f"far</p>{caption}")
    assert measured.place("one.py", "g", html) == html
    assert not measured.problems
    measured.place("one.py", "f", "<p>rewritten</p>")
    assert measured.problems.pop() == "one.py: `f` has no place for the figure tape.caption"


def test_a_figure_that_was_typed_or_is_not_known_is_refused(measured):
    """Breaks where prose may say a number that nobody measured."""
    assert measured.fill("a.md", "{{tape.caption}} `3 MiB` $4$ sixteen bytes", {}).count("torch")
    assert not measured.problems
    for typed in ("64 KiB", "1.4x", "1.43 times faster", "20 %", "3 GB", "12 ms"):
        measured.fill("a.md", f"It takes {typed}.", {})
        assert measured.problems.pop() == f"a.md: `{typed}` is typed, and not filled in"
    measured.fill("a.md", "It takes 3.5 MiB. {{nothing}}", {})
    assert measured.problems == ["a.md: `3.5 MiB` is typed, and not filled in",
                                 "a.md: there is no figure `nothing`"]
    measured.problems.clear()


# ---------------------------------------------------------------------------------------- browser


@contextlib.contextmanager
def started(profile, *flags):
    """A browser that keeps what it stores in a folder"""
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        pytest.skip("chromium and chromedriver are not installed")
    from selenium import webdriver

    class Browser(webdriver.Chrome):
        def get(self, url):
            super().get(url)
            # The driver sometimes returns before the page is there.
            there = json.dumps(url.partition("#")[0])
            until(self, f"location.href.split('#')[0] === {there} "
                        "&& document.readyState === 'complete'")

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for flag in ("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-"
                 "background-networking", "disable-component-update", "disable-sync", *flags):
        options.add_argument(f"--{flag}")
    options.add_argument(f"--user-data-dir={profile}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    driver = Browser(options=options, service=service)
    try:
        yield driver
    finally:
        driver.quit()


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    with started(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


@pytest.fixture
def browser(chromium):
    yield chromium
    expect_no_complaint(chromium)


@pytest.fixture
def measuring(tmp_path):
    """
    A browser that paints in one thread, which takes a third less for each page. It shows some
    animations late, so it is for the sizes of what is on a page alone.
    """
    with started(tmp_path / "profile", "disable-threaded-compositing") as driver:
        yield driver
        expect_no_complaint(driver)


def expect_no_complaint(driver):
    """A page that complains is broken."""
    assert [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"] == []


def look(browser, size, theme="light"):
    width, height = size
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {
        "width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600})
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {
        "features": [{"name": "prefers-color-scheme", "value": theme}]})


def find(browser, selector):
    return browser.find_element("css selector", selector)


def test_no_page_is_wider_than_its_window_and_every_formula_is_drawn(site, measuring):
    """
    Nothing is cut, nothing is fetched from elsewhere, and formulas and pictures have a size. Of the
    pages of tests, which are long and made alike, every third is looked at.
    """
    tests = sorted(site.glob("test_*.html"))
    sizes = [WIDE, PHONE]
    look(measuring, sizes[0])
    for path in sorted({*site.glob("*.html")} - {*tests}) + tests[::3]:
        measuring.get(path.as_uri())
        assert what_is_wrong(measuring) == (0, [], []), (path.name, sizes[0])
        # A window may change while it shows a page, and loading a page takes longest. The next page
        # is loaded in this size: to change it first would lay out the old page again.
        sizes.reverse()
        look(measuring, sizes[0])
        assert what_is_wrong(measuring) == (0, [], []), (path.name, sizes[0])


def what_is_wrong(browser):
    """How much too wide a page is, what has no height, and what came from elsewhere"""
    return tuple(browser.execute_script("""
            const flat = [...document.querySelectorAll('math, svg:not([aria-hidden]), img')].filter(
                (it) => it.checkVisibility() && !it.closest('details:not([open])')
                    && it.getBoundingClientRect().height < 3);
            const page = document.documentElement;
            return [page.scrollWidth - page.clientWidth,
                    flat.map((it) => it.outerHTML),
                    performance.getEntriesByType('resource').map((it) => it.name)
                        .filter((name) => !name.startsWith('file:') && !name.startsWith('data:'))];
        """))


def test_light_and_dark_may_be_chosen_and_are_remembered(site, browser):
    """As the system has it first, then as the button says, on the next page too."""
    ground = "return getComputedStyle(document.body).backgroundColor"
    look(browser, WIDE, "dark")
    browser.get((site / "index.html").as_uri())
    browser.execute_script("localStorage.clear(); location.reload()")
    dark = browser.execute_script(ground)
    look(browser, WIDE, "light")
    light = browser.execute_script(ground)
    assert dark != light
    find(browser, "#book-theme").click()
    assert browser.execute_script(ground) == dark
    browser.get((site / "layer.html").as_uri())
    assert browser.execute_script(ground) == dark
    find(browser, "#book-theme").click()
    assert browser.execute_script(ground) == light


def test_links_lead_through_the_book(site, browser):
    """
    From the index to the heart, from a name in its code to the definition, from a section to a
    test and back, and on to the next page.
    """
    look(browser, WIDE)
    browser.get((site / "index.html").as_uri())
    find(browser, "main a[href='layer.html']").click()
    assert browser.title.startswith("ZeRO-3")
    link = browser.find_element("xpath", "//pre//a[text()='Transfer'][1]")
    target = link.get_attribute("href")
    browser.execute_script("arguments[0].click()", link)
    assert browser.current_url == target
    assert target.endswith("comm-collectives.html#a-collective-in-flight")
    assert find(browser, ":target").is_displayed()
    browser.execute_script("scrollTo(0, document.documentElement.scrollHeight)")
    find(browser, "a[rel=before]").click()
    assert browser.current_url.endswith("sharded.html")
    where = browser.current_url
    summary = find(browser, "details.tests summary")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", summary)
    summary.click()
    find(browser, "details.tests a").click()
    assert "/test_" in browser.current_url and find(browser, ":target").is_displayed()
    links = browser.execute_script("""
        const section = document.querySelector(':target').closest('section');
        return [...section.querySelectorAll('.prose a')].map((link) => link.href);
    """)
    assert any(link.startswith(f"{where}#") for link in links)


# The theme that the page is shown in, by the preference of the system.
THEME = "return matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light'"
TEN = ("index", "problem", "calculator", "life", "tape", "layer", "comm-collectives",
       "ladder", "names", "03_one_layer")
# Text whose contrast with what is behind it is below that of WCAG AA: 4.5, or 3 if it is large.
# Behind text there may be several half-transparent colours. In pictures it is the page.
PALE = """
    const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
    const known = new Map();
    const rgba = (color) => {
      if (!known.has(color)) {
        canvas.clearRect(0, 0, 1, 1);
        canvas.fillStyle = color;
        canvas.fillRect(0, 0, 1, 1);
        const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
        known.set(color, [r, g, b, a / 255]);
      }
      return known.get(color);
    };
    const over = ([r, g, b, a], below) => [r, g, b].map((c, i) => c * a + below[i] * (1 - a));
    const light = (color) => {
      const [r, g, b] = color.map((c) => c / 255).map(
        (c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
      return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const behind = (node) => node ? over(
      rgba(getComputedStyle(node).backgroundColor), behind(node.parentElement)) : [255, 255, 255];
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    const pale = [];
    let count = 0;
    while (walker.nextNode()) {
      const node = walker.currentNode.parentElement, words = walker.currentNode.data.trim();
      if (!words || !node.checkVisibility() || node.closest('script,style,title,desc')) continue;
      const style = getComputedStyle(node), size = parseFloat(style.fontSize);
      const ground = behind(node);
      const ink = over(rgba(node.closest('svg') ? style.fill : style.color), ground);
      const [a, b] = [light(ink), light(ground)].sort((a, b) => b - a);
      const large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
      count += 1;
      if ((a + 0.05) / (b + 0.05) < (large ? 3 : 4.5)) {
        pale.push(`${((a + 0.05) / (b + 0.05)).toFixed(2)} ${node.tagName} ${words.slice(0, 40)}`);
      }
    }
    return [count, [...new Set(pale)]];
"""


def test_all_text_has_enough_contrast(site, browser):
    """
    That of WCAG AA, on ten pages in both themes. Breaks where text is written in the colour of a
    shape.
    """
    look(browser, WIDE)
    browser.get((site / "index.html").as_uri())
    browser.execute_script("localStorage.clear()")
    for name in TEN:
        browser.get((site / f"{name}.html").as_uri())
        for theme in ("light", "dark"):
            look(browser, WIDE, theme)
            assert browser.execute_script(THEME) == theme
            count, pale = browser.execute_script(PALE)
            assert count > 50 and pale == [], (name, theme)


def test_the_path_can_be_read_without_scripts_and_on_paper(site, browser):
    """
    Without scripts each page has its text, its pictures and the sidebar. On paper there is no
    sidebar, the whole width is used, and long lines of code are not cut.
    """
    look(browser, WIDE)
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        for chapter in contents.PATH:
            browser.get((site / build.page_of(chapter.first.path)).as_uri())
            assert find(browser, "main h1").is_displayed()
            assert find(browser, ".side a[aria-current]").is_displayed()
        browser.get((site / "index.html").as_uri())
        assert find(browser, "main svg.staircase").is_displayed()
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
    browser.get((site / "layer.html").as_uri())
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        cut, shown = browser.execute_script("""
            const pages = [...document.querySelectorAll('.code')];
            return [pages.filter((it) => it.scrollWidth > it.clientWidth + 1).length,
                    ['header', '.side', 'footer'].filter(
                        (it) => document.querySelector(it).checkVisibility())];
        """)
        assert (cut, shown) == (0, [])
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_checks_are_folded_and_a_link_into_them_opens_them(site, browser):
    """
    A function that only checks, and a long list of what a chapter does not cover, at the head of a
    file or at its end. Breaks where a link from a test leads to a heading that nobody sees.
    """
    look(browser, WIDE)
    browser.get((site / "index.html").as_uri())
    browser.get((site / "comm-order.html").as_uri())
    closed = browser.execute_script("""
        const parts = [...document.querySelectorAll('.folded')];
        return parts.filter((it) => !it.open).map((it) => it.querySelector('h3, h4').id);
    """)
    # `Group.together` and `Peers.agree`.
    assert len(closed) == 2
    browser.get((site / "comm-order.html").as_uri() + f"#{closed[0]}")
    browser.refresh()
    for i in (0, 1):
        browser.execute_script(f"location.hash = '{closed[i]}'")
        shown = "const it = document.querySelector(':target'); return !!it && it.checkVisibility()"
        for _ in range(50):
            if browser.execute_script(shown):
                break
            time.sleep(0.1)
        assert browser.execute_script(shown)
    browser.get((site / "optimizer-stage3.html").as_uri())
    assert find(browser, ".head .limits").get_attribute("open") is None
    browser.get((site / "layer.html").as_uri())
    assert find(browser, ".row .limits").get_attribute("open") is None
    assert browser.execute_script("""
        const last = [...document.querySelectorAll('.line')].at(-1);
        return last.compareDocumentPosition(document.querySelector('.limits'));
    """) == 4  # It stands behind the last line.


def test_the_search_finds_headings_tests_and_names(site, browser):
    """Each hit is a link; Enter goes to the first."""
    look(browser, PHONE)
    browser.get((site / "life.html").as_uri())
    for words in ("unshard (all-gather)", "fetch_params", "padding loses nothing"):
        field = find(browser, "#book-search")
        field.clear()
        field.send_keys(words)
        # The index is loaded now.
        until(browser, "document.querySelector('#book-found a')")
        assert words.split()[0] in find(browser, "#book-found a").text.lower()
    field.send_keys("\n")
    assert "test_layer.html#test_merging_and_padding_loses_nothing" in browser.current_url


def test_the_search_puts_the_path_first_and_knows_other_libraries_names(site, browser):
    """
    A page by its title; a section by the words of its text, but not by a part of a word; and what
    FSDP2 calls it. Breaks where the source of the book comes first.
    """
    look(browser, WIDE)
    browser.get((site / "life.html").as_uri())
    assert not browser.execute_script("return window.INDEX")
    find(browser, "#book-search").send_keys("x")
    until(browser, "window.INDEX")

    def hits(words):
        return browser.execute_script(
            "return search(arguments[0]).map((hit) => [hit[0].toLowerCase(), hit[1], hit[3]])",
            words)

    assert hits("calculator")[0][1].startswith("calculator.html")
    assert hits("tape")[0][1].startswith("tape.html")
    assert any(address == "names.html" for _, address, _ in hits("fully_shard"))
    for words in ("nvme", "fsdp2"):
        assert hits(words) and hits(words)[0][2] < 4, words
    assert not any("changed" in title and "hang" not in title.replace("changed", "")
                   for title, _, _ in hits("hang"))


def test_figures_of_a_step_and_of_the_compilers_passes_are_told_apart(site):
    """
    The chapter with numbers and the heart show chains, and the compiler its passes. Breaks where
    two figures have the same name.
    """
    for page in ("life.html", "layer.html", "optimizer-buckets.html"):
        assert "Drawn from the graphs of a chain" not in (site / page).read_text(), page
    assert (site / "compiler-passes.html").read_text().count("Drawn from the graphs") == 5


def test_the_search_is_used_with_the_keyboard(site, browser):
    """
    Arrows move through the results and back, Escape returns to the field, tests come last, and the
    list says that nothing is found. Breaks if a result goes together with the focus.
    """
    from selenium.webdriver import Keys

    look(browser, WIDE)
    browser.get((site / "life.html").as_uri())

    def press(key):
        browser.switch_to.active_element.send_keys(key)
        return browser.switch_to.active_element

    field = find(browser, "#book-search")
    field.send_keys("prefetch")
    until(browser, "document.querySelector('#book-found a')")
    hits = browser.find_elements("css selector", "#book-found a")
    tests = [hit.get_attribute("href").rpartition("/")[2].startswith("test") for hit in hits]
    assert tests == sorted(tests) and len(hits) > 2
    assert [press(Keys.ARROW_DOWN) for _ in range(2)] == hits[:2]
    assert press(Keys.ARROW_UP) == hits[0]
    assert press(Keys.ARROW_UP) == field
    press(Keys.ARROW_DOWN)
    assert press(Keys.ESCAPE) == field and not find(browser, "#book-found").is_displayed()
    field.clear()
    field.send_keys("xyzzy")
    assert find(browser, "#book-found").text == "nothing found"
    field.send_keys(Keys.BACKSPACE * 5)
    assert not find(browser, "#book-found").is_displayed()


# --------------------------------------------------------------------------------------- the tape


def until(browser, condition, seconds=60):
    """Waits until a script returns something true, and returns it."""
    end_s = time.monotonic() + seconds
    while not (found := browser.execute_script(f"return {condition}")):
        assert time.monotonic() < end_s, condition
        time.sleep(0.05)
    return found


def visit(browser, site, page, size=WIDE, motion="no-preference"):
    look(browser, size)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {
        "features": [{"name": "prefers-reduced-motion", "value": motion}]})
    # From another page, because an address that differs only after the # is not loaded again.
    browser.get("about:blank")
    browser.get((site / page.partition("#")[0]).as_uri() + page[len(page.partition("#")[0]) :])
    until(browser, "!!window.tape")


def pressed(browser):
    """The names of the buttons of the page's tape that are pressed"""
    return browser.execute_script("""
        return [...document.querySelectorAll('#tape .tape-group [aria-pressed=true]')]
            .map((it) => it.getAttribute('aria-label') || it.textContent);
    """)


@pytest.mark.parametrize("page", ["index.html", "tape.html"])
def test_the_tape_plays_once_by_itself(site, browser, page):
    """
    It begins when it comes into view, its sentence changes, and it stops at the end. A press of a
    button ends it. Breaks where it begins again, or where nobody can stop it.
    """
    visit(browser, site, page)
    browser.execute_script("document.querySelector('#tape .tape-says').scrollIntoView(false)")
    until(browser, "tape.playing")
    said = find(browser, "#tape .tape-says").text
    assert find(browser, "#tape .tape-says").get_attribute("aria-live") == "off"
    button = find(browser, "#tape .tape-play")
    assert button.text == "Pause"
    browser.execute_script("arguments[0].click()", button)
    at = browser.execute_script("return tape.index")
    time.sleep(0.9)
    assert browser.execute_script("return [tape.playing, tape.index]") == [False, at]
    assert find(browser, "#tape .tape-says").get_attribute("aria-live") == "polite"
    browser.execute_script("tape.pace = () => 4; tape.play()")
    until(browser, "tape.index === tape.count && !tape.playing")
    time.sleep(0.2)
    assert browser.execute_script("return [tape.playing, tape.index === tape.count]") == [
        False, True]
    assert find(browser, "#tape .tape-says").text != said
    assert button.text == "Play"


@pytest.mark.parametrize("page", ["index.html", "tape.html"])
def test_the_tape_stays_still_where_motion_is_unwelcome(site, browser, page):
    """
    It shows the peak. Breaks where only the style sheet asks for the preference.
    """
    visit(browser, site, page, motion="reduce")
    browser.execute_script("document.querySelector('.memory-here').scrollIntoView()")
    time.sleep(0.8)
    assert browser.execute_script("return [tape.playing, tape.index === tape.tape.peak]") == [
        False, True]
    assert "Backward" in find(browser, "#tape .tape-says").text


@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
def test_the_tape_can_be_scrubbed(site, browser, size):
    """
    Event by event, by phase, by address; the sentence, the states of the layers and the running
    line change with it, and the line is that of the source's page.
    """
    visit(browser, site, "tape.html", size)

    def buttons(text):
        return next(b for b in browser.find_elements("css selector", "#tape button")
                    if b.text == text)

    def now():
        return (browser.execute_script("return tape.index"), find(browser, ".tape-says").text,
                [g.get_attribute("data-state") for g in
                 browser.find_elements("css selector", "#tape [data-state]")])

    browser.execute_script("tape.jump(0)")
    seen = [now()]
    for _ in range(3):
        buttons("▶").click()
        seen.append(now())
    assert [index for index, *_ in seen] == [0, 1, 2, 3]
    assert len({text for _, text, _ in seen}) == 4 and seen[0][2] != seen[3][2]
    buttons("backward").click()
    assert "Backward" in now()[1]
    find(browser, "#tape input").send_keys("\ue014")
    line = find(browser, "#tape pre .now")
    file, number, _ = browser.execute_script("return tape.lines[0]")
    source = (build.ROOT / "zero3" / file).read_text().split("\n")[number - 1]
    assert source.strip() in line.text
    for link in browser.execute_script(
            "return [...document.querySelectorAll('#tape pre a[href]')].map((it) => it.href)"):
        page, _, anchor = link.partition("#")
        assert f' id="{anchor}"' in (site / page.rsplit("/", 1)[1]).read_text()
    # No running line is cut.
    wide = browser.execute_script("""
        return tape.tape.events.map((e, i) => {
            tape.jump(i + 1);
            const box = document.querySelector('#tape pre');
            return box.scrollWidth - box.clientWidth;
        });
    """)
    assert max(wide) <= 0
    # The address keeps the position, that before the first event too, and may be wrong.
    for index in (5, 0):
        browser.execute_script(f"tape.jump({index})")
        until(browser, f"location.hash === '#e={index}&tape=2-prefetch'")
    visit(browser, site, "tape.html#e=7&tape=9-x", size)
    until(browser, "tape.index === 7 && tape.tape.key === '2-prefetch'")
    visit(browser, site, "tape.html#e=54&tape=3-demand", size)
    until(browser, "tape.index === 54 && tape.tape.key === '3-demand' && !tape.playing")
    until(browser, "document.documentElement.scrollWidth <= innerWidth")


def test_ranks_and_prefetch_choose_a_recording_at_the_same_event(site, browser):
    """
    Six of the recordings, each in its file. The event, layer and phase stay where the other
    recording has them. Breaks where a button leaves the picture of another recording.
    """
    visit(browser, site, "tape.html", motion="reduce")
    rows = "return document.querySelectorAll('#tape [data-state]').length"
    event = "return [tape.event.layer, tape.event.event, tape.event.phase]"
    assert pressed(browser) == ["ranks: 2", "prefetch: on", "activations: stay", "backward"]
    same = browser.execute_script(event)
    seen = set()
    for ranks in (1, 2, 3):
        for prefetch, key in (("off", "demand"), ("on", "prefetch")):
            for name in (f"ranks: {ranks}", f"prefetch: {prefetch}"):
                find(browser, f"#tape [aria-label='{name}']").click()
            until(browser, f"tape.tape.key === '{ranks}-{key}'")
            assert pressed(browser)[:2] == [f"ranks: {ranks}", f"prefetch: {prefetch}"]
            assert browser.execute_script(rows) == 6 * ranks
            assert browser.execute_script(event) == same
            seen.add(find(browser, "#tape .tape-memory .tape-line").get_attribute("d"))
    assert len(seen) == 6
    find(browser, "a[data-event]").click()
    assert browser.execute_script("return tape.event.event") == "compute"


def test_activations_that_leave_are_beside_their_layers(site, browser):
    """
    The button chooses a recording of the same ranks and the same event, and the address keeps it.
    Below each layer that has saved some is their state, on each rank; the legend has their bytes,
    which are the most in memory of the formula. Breaks if they stay in sight in the other
    recordings.
    """
    visit(browser, site, "tape.html", motion="reduce")
    assert pressed(browser)[2] == "activations: stay"
    states = """
        return [...document.querySelectorAll('#tape [data-saved]')].map((it) => it.dataset.saved);
    """
    event = "return [tape.event.layer, tape.event.event, tape.event.phase]"
    legend = "return document.querySelector('#tape .tape-legend li:last-child').offsetHeight"
    assert browser.execute_script(states) == [] and not browser.execute_script(legend)
    same = browser.execute_script(event)
    find(browser, "#tape [aria-label='activations: leave']").click()
    until(browser, "tape.tape.key === '2-prefetch-leave'")
    assert browser.execute_script(event) == same and pressed(browser)[2] == "activations: leave"
    find(browser, "[data-tape='2-prefetch-leave']").click()
    until(browser, "tape.event.event === 'activations out'")
    assert browser.execute_script(states) == ["leaving"] * 2
    browser.execute_script("tape.jump(tape.index + 6)")
    assert browser.execute_script(states) == ["away"] * 2 + ["leaving"] * 2
    most = browser.execute_script("""
        const each = [...document.querySelectorAll('#tape .tape-note')][0].textContent;
        tape.jump(tape.tape.saved.indexOf(Math.max(...tape.tape.saved)));
        return [each, document.querySelector('#tape .tape-legend li:last-child b').textContent]""")
    assert f"at most {most[1]} bytes" in most[0]
    at = browser.execute_script("return tape.index")
    visit(browser, site, f"tape.html#e={at}&tape=2-prefetch-leave")
    until(browser, f"tape.index === {at} && tape.tape.key === '2-prefetch-leave'")
    find(browser, "#tape [aria-label='activations: stay']").click()
    until(browser, "tape.tape.key === '2-prefetch'")
    assert browser.execute_script(states) == []


def test_of_two_choices_of_a_recording_the_second_one_counts(site, browser):
    """
    The first one's file comes last. Breaks where it then takes the place of the second, or where
    the second button forgets what the first one chose.
    """
    visit(browser, site, "tape.html", motion="reduce")
    browser.execute_script("""
        const load = Tape.load;
        window.late = [];
        Tape.load = (key, then) => load(key, tape => late.push([key, () => then(tape)]));""")
    for name in ("ranks: 1", "prefetch: off"):
        find(browser, f"#tape [aria-label='{name}']").click()
    until(browser, "late.length === 2")
    found = browser.execute_script("""
        late.sort((a, b) => a[0] === "1-prefetch" ? 1 : -1).forEach(each => each[1]());
        return [late.map(each => each[0]), tape.tape.key]""")
    assert found == [["1-demand", "1-prefetch"], "1-demand"]


def test_the_dock_marks_the_line_that_runs(site, browser):
    """
    In the source of the page, with the lines that called it. The page scrolls there only with
    Follow, only if no marked line is in sight, and until the reader scrolls by hand. Breaks where
    a line of another file is marked, or where Play moves the text that somebody reads.
    """
    visit(browser, site, "layer.html", motion="reduce")
    marked = """
        return ['now', 'call'].map((kind) => [...document.querySelectorAll(`.line.tape-${kind}`)]
            .map((it) => +it.id.slice(1)).sort());
    """
    count = browser.execute_script("return tape.count")
    for i in (1, 9, count // 2, count):
        browser.execute_script(f"tape.jump({i})")
        here = [number for file, number, _ in browser.execute_script("return tape.lines")
                if file == "layer.py"]
        assert browser.execute_script(marked) == [here[:1], sorted(here[1:])]
    pace = browser.execute_script("tape.paceOfDock = tape.pace; scrollTo(0, 0); tape.jump(9);"
                                  "tape.pace = () => 30; tape.play(); return tape.paceOfDock()")
    until(browser, "tape.index > 40 && tape.playing")
    assert browser.execute_script("return scrollY") == 0
    browser.execute_script("tape.stop(); tape.jump(9)")
    find(browser, "#dock .tape-follow").click()
    browser.execute_script("scrollTo(0, 0); tape.jump(10)")
    assert browser.execute_script("return tape.paceOfDock()") > 2 * pace
    at = browser.execute_script("tape.jump(0); const at = scrollY; tape.jump(10); return at")
    assert at > 0 and browser.execute_script("return scrollY") == at
    assert browser.execute_script("return tape.paceOfDock()") == pace
    browser.execute_script("tape.play()")
    until(browser, "tape.index > 40 && tape.playing")
    browser.execute_script("document.body.dispatchEvent(new Event('wheel', {bubbles: true}))")
    assert find(browser, "#dock .tape-follow").get_attribute("aria-pressed") == "false"
    at = browser.execute_script("tape.stop(); scrollTo(0, 0); tape.jump(9); return scrollY")
    find(browser, "#dock .tape-follow").click()
    until(browser, f"scrollY > {at} + 1000")
    until(browser, """(() => {
        const line = document.querySelector('.line.tape-now').getBoundingClientRect();
        return line.top > 0 && line.bottom < document.getElementById('dock').offsetTop;
    })()""")
    assert not (site / "test_tape.html").read_text().count("tape-dock.js")


def test_a_line_moves_the_tape(site, browser):
    """
    A pointer that rests on a line, a click on it, or the button beside it: each goes to the line's
    next event, and after the last one to the first. Breaks where a line that scrolls below the
    pointer counts, where a reader who points at the marked line loses the place, or where
    selecting text moves the tape.
    """
    from selenium.webdriver import ActionChains

    visit(browser, site, "layer.html")
    marks = browser.find_elements("css selector", ".line .tape-mark")
    mark = next(m for m in marks if m.get_attribute("data-n") == "6")
    line = mark.find_element("xpath", "..")
    events = browser.execute_script("""
        const number = +arguments[0].id.slice(1);
        return tape.tape.events.map((e, i) => [e, i + 1]).filter(([e]) =>
            e.lines.some(([file, n]) => file === 'layer.py' && n === number)).map(([, i]) => i);
    """, line)
    assert len(events) == 6 and "events of the tape" in mark.get_attribute("aria-label")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", line)
    assert browser.execute_script("return tape.index") == 0

    def point():
        away = ActionChains(browser).move_to_element(find(browser, "header"))
        away.move_to_element(line).perform()
        return browser.execute_script("return tape.index")

    assert point() == 0
    until(browser, f"tape.index === {events[0]}", 2)
    assert "tape-now" in line.get_attribute("class") or "tape-call" in line.get_attribute("class")
    point()
    time.sleep(0.6)
    assert browser.execute_script("return tape.index") == events[0]
    browser.execute_script("tape.jump(0)")
    point()
    line.click()
    time.sleep(0.6)
    # A slow browser lets the pointer rest before the click, which is then the second event.
    assert browser.execute_script("return tape.index") in events[:2]
    browser.execute_script(f"tape.jump({events[0]})")
    drag = ActionChains(browser).move_to_element_with_offset(line, 130 - line.size["width"] // 2, 0)
    drag.click_and_hold().move_by_offset(90, 0).release().perform()
    time.sleep(0.6)
    assert browser.execute_script("return [getSelection().isCollapsed, tape.index]") == [
        False, events[0]]
    browser.execute_script("getSelection().removeAllRanges()")
    line.click()
    assert browser.execute_script("return tape.index") == events[1]
    # The focus of the keyboard moves the tape, and so does each press.
    mark.send_keys("\n")
    at = events.index(browser.execute_script("return tape.index"))
    assert at in (2, 3)
    for i in (*events[at + 1 :], events[0]):
        ActionChains(browser).send_keys("\n").perform()
        assert browser.execute_script("return tape.index") == i


@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
def test_the_dock_may_be_closed_and_covers_nothing(site, browser, size):
    """
    It is one bar until the tape moves, and on a phone until somebody opens it; the choice is
    remembered on the next page. The end of the page is above it, and nothing is wider than the
    window.
    """
    visit(browser, site, "layer.html", size)
    browser.execute_script("localStorage.removeItem('dock'); location.reload()")
    until(browser, "!!window.tape")
    closed = "return document.getElementById('dock').hasAttribute('data-closed')"
    assert browser.execute_script(closed)
    browser.execute_script("tape.jump(1)")
    assert browser.execute_script(closed) == (size == PHONE)
    for _ in range(2):
        high = until(browser, "document.getElementById('dock').offsetHeight")
        assert (high < 60) == browser.execute_script(closed)
        browser.execute_script("scrollTo(0, document.documentElement.scrollHeight)")
        until(browser, "document.querySelector('footer').getBoundingClientRect().bottom <= "
                       "document.getElementById('dock').getBoundingClientRect().top + 1")
        assert browser.execute_script(
            "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
        ) == 0
        find(browser, "#dock .tape-toggle").click()
        time.sleep(0.1)
    find(browser, "#dock .tape-toggle").click()
    visit(browser, site, "comm-collectives.html", size)
    assert browser.execute_script(closed) == (size == WIDE)
    browser.execute_script("localStorage.removeItem('dock')")


def test_without_a_script_the_figure_is_there(site, browser):
    """
    In the element that the tape replaces. Breaks where the page is empty until a script has run.
    """
    for page in ("index.html", "tape.html"):
        html = (site / page).read_text()
        inside = html[html.index('id="tape"') :]
        assert "<svg" in inside[: inside.index("</div>")]
        assert inside.index("<svg") < inside.index("<script")


def test_a_trace_for_perfetto_is_beside_the_pages(site):
    """Its parts are what `test_tape.py` looks at."""
    assert os.path.getsize(site / "trace.json") > 10_000
