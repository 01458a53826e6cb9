r"""
# The site

Builds the pages of the book: the source in two columns, the notebooks, the tests, and the pages in
`docs/*.md`.

Nothing is written twice. Prose comes from the source, and links from names. Figures come from runs
that are recorded during the build. Timings come from a file that also records the device and a
digest of the code.

The build fails if it finds a link to a missing page, two anchors of the same name, a formula that
does not parse, a source line that is missing or duplicated, a timing of code that has changed
since, or a class or public function that no test names.

The pages need no server and load nothing from the network. Formulas are MathML, such as

$$3\Psi\,\frac{N-1}{N}$$

and scripts are used only for the search, the colour theme and the tape, which HTML alone cannot do.

**Run this**: `make docs`, then open `build/site/index.html`.

**Not covered, and what that costs**: links to other sites are not checked, so they may be dead.
"""

import argparse
import gc
import json
import os
import re
import shutil
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape, unescape
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import nbformat
from latex2mathml.converter import convert
from markdown_it import MarkdownIt
from mdit_py_plugins.dollarmath import dollarmath_plugin

from docs import contents, elsewhere
from docs.annotate import Names, Row, Source, slug
from docs.contents import ROOT, page_of
from docs.figures import Figures, colored
from docs.frame import Frame, words_and_lines
from notebooks.run import joined

INDEX = "docs/index.md"
# Each of these files has a page.
SOURCES = ("zero3/**/*.py", "docs/*.md", "notebooks/*.ipynb", "tests/**/*.py", "docs/**/*.py")
STYLES = ("docs/*.css", "docs/*.js", "docs/*.svg")
# The colours of numbers in tables, by words that say what they are. The first one that fits counts.
MEANT = {r"reduce|exchange": "reduced", r"gradient|divide": "grad", r"moment|state|master": "state",
         r"unshard|gather|whole|flat|full|kept": "whole", r"shard|rest|step|file|buffer": "shard"}
# What a collective with this kind of result begins with.
INPUTS = {"whole": "shard", "reduced": "grad"}
# Functions that only check, or word an error.
GUARDS = r"(^|\.)_*(check|refuse|expect|told|agree|fail|together|assert|explain|warn)(_|$)"
# The most words of the path, without folded text, and its lines of code; and the most words of the
# book without tests, notebooks and its own source, which may only become fewer.
PATH_WORDS = 20_000
PATH_LINES = 1_800
BOOK_WORDS = 80_000
LONG = 600  # characters of HTML, of what a chapter does not cover, from which on it is folded
# A figure says which run it is drawn from, or that it is calculated.
ORIGIN = r"commit \w+|from the formulas of"
# The number of children of MathML elements with a fixed number.
PARTS = {"mfrac": 2, "msub": 2, "msup": 2, "msubsup": 3, "munder": 2, "mover": 2, "munderover": 3}


class Site:
    """
    ## The pages, the links between them, and the problems found
    """

    def __init__(self, figures: Figures):
        """
        ### Read the sources of the pages

        * `figures` has the results of recorded runs
        """
        self.figures = figures
        self.problems: list[str] = []
        chapters = (*contents.PATH, *contents.FURTHER, *contents.appendix())
        # The files that the pages are made of, in reading order.
        self.paths = [INDEX, *(item.path for chapter in chapters for item in chapter.items)]
        python = [path for path in self.paths if path.endswith(".py")]
        self.chapters = [self.source(path) for path in contents.sources()]
        self.tests = [self.source(path) for path in python if path.startswith("tests/")]
        self.tools = [self.source(path) for path in python if path.startswith(("docs/", "note"))]
        self.names = Names(self.chapters)
        # The notes about other libraries, by section (file and name).
        self.elsewhere = {self.names.find(key): note for key, note in elsewhere.notes().items()}
        # The tests that prove a section (file and name) or an invariant (number).
        self.proofs: dict[Any, list[tuple[Source, Row]]] = defaultdict(list)
        for test in self.tests:
            for row in test.rows:
                for claim in self.proven(test, row):
                    self.proofs[claim].append((test, row))
        # The page of each file, by its path from the root.
        self.files = {path: page_of(path) for path in self.paths}
        # The page of each chapter, by file name without folder and with it.
        self.by_name = {source.path.name: source.page for source in self.chapters}
        self.by_name |= {path.removeprefix("zero3/"): page_of(path) for path in contents.sources()}
        # For each page its HTML, and its headings with their levels and anchors.
        self.bodies: dict[str, str] = {}
        self.headings: dict[str, list[tuple[int, str, str]]] = defaultdict(list)
        # For each page the written levels of the last heading and of those around it.
        self.around: dict[str, list[int]] = defaultdict(list)
        self.markdown = MarkdownIt("commonmark", {"html": True}).enable("table")
        self.markdown.use(dollarmath_plugin, double_inline=True, renderer=self.formula)
        self.markdown.renderer.rules |= {"code_inline": self.named, "text": self.numbered}

    def source(self, path: str) -> Source:
        return Source(ROOT / path, page_of(path))

    def expect(self, good: Any, problem: str) -> None:
        """
        ### Record a problem unless `good`
        """
        if not good:
            self.problems.append(problem)

    def proven(self, test: Source, row: Row) -> Iterator[Any]:
        """
        ### The sections and invariants that a test proves

        They are named after "Proves" at the end of its docstring: `Zero3Layer.fetch_params`, or I4.
        """
        said = re.search(r"\bProves\s(.*)\.\s*$", row.prose, re.DOTALL)
        for name, number in re.findall(r"`([^`]+)`|\b(I\d+)\b", said[1] if said else ""):
            one = number or self.names.find(name)
            self.expect(one, f"{test.path.name}: {row.name} proves `{name}`, "
                        "which is not in the package, or ambiguous")
            if one:
                yield one

    # ----------------------------------------------------------------------------------- markdown

    def formula(self, tex: str, options: dict) -> str:
        """
        ### A formula as MathML
        """
        # The converter copies unknown commands, and accepts a fraction without a denominator.
        try:
            html = convert(tex, display="block" if options["display_mode"] else "inline")
            wrong = [e.tag for e in ElementTree.fromstring(html).iter()
                     if len(e) != PARTS.get(e.tag.split("}")[-1], len(e))]
        except Exception as error:
            html = escape(repr(error))
            wrong = [tex]
        self.expect("\\" not in html and tex.count("{") == tex.count("}") and not wrong,
                    f"a formula does not parse: {tex}")
        return html

    def named(self, tokens: list, i: int, options: Any, env: dict) -> str:
        """
        ### Code within prose, with a link if it is a name of the package
        """
        text = tokens[i].content
        at = env["at"]
        # Let a long name break after an underscore, but not after its first letter.
        broken = re.sub(r"(?<=[a-z])_", "_<wbr>", escape(text, quote=False))
        html = f"<code>{broken}</code>"
        one = self.names.find(text.removesuffix("()"), at)
        target = self.names.address(*one, at) if one else self.by_name.get(text)
        # Links cannot be nested.
        return f'<a href="{target}">{html}</a>' if target and not tokens[i].meta else html

    def numbered(self, tokens: list, i: int, options: Any, env: dict) -> str:
        """
        ### Text, with links for the numbers of invariants
        """
        text = escape(tokens[i].content, quote=False)
        if re.fullmatch(r"[\d.]+( [\d.]+)+", text):
            # The elements of a tensor stay on one line.
            return f'<span class="num">{text.replace(" ", "&nbsp;")}</span>'
        self.expect("$" not in text, f"a formula has no end: {text}")
        link = r'<a href="invariants.html#i\1">I\1</a>'
        return text if tokens[i].meta else re.sub(r"\bI(10|[1-9])\b", link, text)

    def prose(self, text: str, origin: str, at: Source | None = None) -> str:
        """
        ### Markdown as HTML

        Headings get anchors, and links to files become links to their pages.

        * `origin` is the file that the text comes from
        * `at` is the same file if it is Python source
        """
        env: dict[str, Any] = {"at": at}
        page = self.files[origin]
        # Pages in `docs/` contain HTML, and so do notebooks, whose answers are folded.
        self.markdown.options["html"] = not origin.startswith(("zero3/", "tests/")) and at is None
        tokens = self.markdown.parse(text, env)
        for i, token in enumerate(tokens):
            if token.type == "heading_open":
                plain = re.sub(r"[`$*]", "", tokens[i + 1].content)
                token.attrSet("id", slug(plain))
                level = self.level(page, int(token.tag[1]))
                # The tag at the beginning, the text, and the tag at the end.
                token.tag = tokens[i + 2].tag = f"h{level}"
                self.headings[page].append((level, plain, slug(plain)))
            linked = token.type == "inline" and tokens[i - 1].type == "heading_open"
            for child in token.children or ():
                if child.type == "link_open" and "://" not in (href := str(child.attrGet("href"))):
                    path, mark, anchor = href.partition("#")
                    at_root = os.path.normpath(Path(origin).parent / path)
                    target = self.files.get(at_root, path)
                    child.attrSet("href", target + mark + anchor)
                if child.type == "image":
                    # Pictures lie beside the pages.
                    child.attrSet("src", Path(str(child.attrGet("src"))).name)
                linked = child.type == "link_open" or (linked and child.type != "link_close")
                child.meta = {"linked": True} if linked else {}
        html = self.markdown.renderer.render(tokens, self.markdown.options, env)
        html = re.sub("<table>.*?</table>", lambda found: meant(found[0]), html, flags=re.DOTALL)
        html = re.sub(r'<div class="wide">\s*<table>.*?</table>',
                      lambda found: cards(found[0]), html, flags=re.DOTALL)
        return re.sub(r'(<h\d id="([^"]+)">.*?)(?=</h)', r'\1<a class="anchor" href="#\2" '
                      'aria-label="link to this section"></a>', html)

    def level(self, page: str, written: int) -> int:
        """
        ### The level of the next heading of a page, without a jump

        In the source a private function has level 4, also if a function of level 2 comes before it.
        It becomes one of level 3 there, and so does its neighbour of level 4.

        * `written` is the level in the source
        """
        around = self.around[page]
        while around and around[-1] >= written:
            around.pop()
        around.append(written)
        return len(around)

    # -------------------------------------------------------------------------------------- pages

    def annotated(self, source: Source) -> str:
        """
        ### A file in two columns
        """
        links = self.names.links(source)
        first, *others = source.rows
        imports = [number for number in first.lines if number <= source.last_import]
        rest = first.lines[len(imports) :]
        rows = [head(self.explained(source, first), imports, self.code(source, imports, links),
                     self.code(source, rest, links))]
        for name, section in sections(source, others):
            html = "\n".join(beside(row, self.explained(source, row),
                                    self.code(source, row.lines, links)) for row in section)
            rows.append(folded(source, name, html) if re.search(GUARDS, name) else html)
        if source in self.chapters:
            rows.append(self.figures.dock(str(source.path.relative_to(ROOT / "zero3"))))
        return "\n".join(rows)

    def explained(self, source: Source, row: Row) -> str:
        """
        ### The prose of a row, with its figures, its notes and its tests
        """
        path = str(source.path.relative_to(ROOT))
        prose = self.prose(re.sub(r"\n(?=Proves )", "\n\n", row.prose), path, source)
        if row.name and not row.heading:
            # Tests have no headings. Their names are sentences.
            title = row.name.removeprefix("test_").replace("_", " ")
            level = self.level(source.page, 3)
            self.headings[source.page].append((level, title, row.anchor))
            prose = f'<h{level} id="{row.anchor}">{escape(title)}</h{level}>{prose}'
        if source not in self.chapters:
            return prose
        file = path.removeprefix("zero3/")
        if row.name or row is source.rows[0]:
            prose = self.figures.place(file, row.name, prose)
        return (prose + self.done_elsewhere((source.key, row.name))
                + self.tested(self.proofs.get((source.key, row.name), []))
                + self.figures.beside(file, row.lines))

    def code(self, source: Source, lines: list[int], links: dict[tuple[int, int], str]) -> str:
        """
        ### Lines of code, or nothing if there are none
        """
        code = source.code(lines, links)
        self.expect(code.count('<span class="line"') == len(lines),
                    f"{source.path.name}: of lines {lines} some are missing or duplicated")
        return f'<pre class="code">{code}</pre>' if lines else ""

    def done_elsewhere(self, section: tuple[str, str]) -> str:
        """
        ### A folded note about other libraries, or an empty text if there is none
        """
        if section not in self.elsewhere:
            return ""
        note = self.prose(self.elsewhere[section], "docs/elsewhere.md")
        return ('<details class="elsewhere"><summary>How FSDP2 and DeepSpeed do this</summary>'
                f"{note}</details>")

    def tested(self, proofs: list[tuple[Source, Row]]) -> str:
        """
        ### A list of tests, or an empty text if there are none
        """
        if not proofs:
            return ""
        items = "".join(f'<li><a href="{test.page}#{row.anchor}">'
                        f"{row.name.replace('_', '_<wbr>')}</a></li>" for test, row in proofs)
        count = f"{len(proofs)} test{'s' * (len(proofs) > 1)}"
        return f'<details class="tests"><summary>{count}</summary><ul>{items}</ul></details>'

    def text(self, path: str, values: dict[str, str]) -> str:
        """
        ### A page of text, with its figures

        * `values` are more figures, by name
        """
        text = self.figures.fill(path, (ROOT / path).read_text(), values)
        return f'<div class="text">{self.prose(text, path)}</div>'

    def counted(self) -> str:
        """
        ### How many tests prove how many sections
        """
        sections = [claim for claim in self.proofs if isinstance(claim, tuple)]
        tests = {(test.page, row.name) for proofs in self.proofs.values() for test, row in proofs}
        return (f"{len(sections)} sections of the source link to the {len(tests)} tests that "
                "prove them.")

    def notebook(self, path: str) -> str:
        """
        ### An executed notebook
        """
        parts = []
        said = [Path(path).stem]  # the headings so far, the last of which says what a picture shows
        for cell in nbformat.read(ROOT / path, as_version=4).cells:
            if cell.cell_type == "markdown":
                parts.append(self.prose(cell.source, path))
                said = re.findall(r"^#+ (.*)", cell.source, re.MULTILINE) or said
                continue
            parts.append(f'<pre class="cell">{colored(cell.source)}</pre>')
            for output in joined(cell.outputs):
                data = output.get("data", {})
                if "image/png" in data:
                    about = escape(re.sub("[`$*]", "", f"Figure: {said[-1]}"))
                    parts.append(f'<div class="picture"><img alt="{about}" src="data:image/png;'
                                 f'base64,{data["image/png"].strip()}"></div>')
                elif text := output.get("text") or data.get("text/plain"):
                    parts.append(f'<pre class="output">{escape(text)}</pre>')
        return f'<div class="text">{"".join(parts)}</div>'

    def build(self) -> dict[str, str]:
        """
        ### All pages, by file name
        """
        for source in (*self.chapters, *self.tests, *self.tools):
            self.bodies[source.page] = self.annotated(source)
        proofs = {f"proofs.{claim}": self.tested(tests) for claim, tests in self.proofs.items()}
        for path in (path for path in self.paths if path != INDEX):
            if path.endswith(".ipynb"):
                self.bodies[page_of(path)] = self.notebook(path)
            elif path.endswith(".md"):
                self.bodies[page_of(path)] = self.text(path, proofs)
        self.frame = Frame(self.bodies, self.headings)
        # The index says how long the other pages are.
        about = {"path": self.frame.path(), "tests.sentence": self.counted()}
        self.bodies[page_of(INDEX)] = self.text(INDEX, about)
        return {page: self.frame.framed(page) for page in map(page_of, self.paths)}

    def search_index(self) -> str:
        """
        ### The entries of the search: headings, tests, names, and other libraries' names

        Each has a title, an address, the title of its page, a rank and the beginning of its text.
        Pages of the path come first, and tests and the source of the book last.
        """
        path = {page_of(item.path) for chapter in contents.PATH for item in chapter.items}
        last = {source.page for source in (*self.tests, *self.tools)}
        entries: list[tuple[str, str, str, int, str]] = []
        for page, headings in self.headings.items():
            for level, text, anchor in headings:
                rank = 4 if page in last else 3 - (page in path) - (level == 1)
                more = "" if page in last else self.beginning(page, anchor)
                entries.append((text, f"{page}#{anchor}", self.frame.title(page), rank, more))
        entries += [(name, self.names.address(source.key, name), source.path.name, 2, "")
                    for source in self.chapters for name in source.defined]
        for row in re.findall("<tr>.*?</tr>", self.bodies["names.html"], re.DOTALL):
            first, *others = (plain(cell) for cell in re.findall("<td.*?</td>", row, re.DOTALL)
                              or [""])
            if first:
                entries.append((first, "names.html", "Names", 3, " ".join(others)))
        return f"window.INDEX = {json.dumps(entries)};\n"

    def beginning(self, page: str, anchor: str) -> str:
        """
        ### The first sentences below a heading
        """
        after = self.bodies[page].partition(f' id="{anchor}"')[2].partition("<p>")[2]
        return plain(after.partition("</p>")[0])[:200]

    # ------------------------------------------------------------------------------------- checks

    def check(self, pages: dict[str, str]) -> None:
        """
        ### Check links and anchors, and that a test proves each public name
        """
        for path in (path for pattern in SOURCES for path in found(pattern)):
            self.expect(path in self.paths, f"{path} is neither on the path nor in the appendix")
        for path in contents.TABLES:
            self.expect((ROOT / path).read_text() == contents.with_tables(path),
                        f"{path}: its table is not that of docs/contents.py; `python -m "
                        "docs.contents --write`")
        beside = {"search.js", *self.figures.files, *(Path(path).name for pattern in STYLES
                                                      for path in found(pattern))}
        # In text and code `<` is escaped, so every `<` begins a tag.
        anchors = {page: Counter(re.findall(r'<[a-z][^<>]*\sid="([^"]+)"', html))
                   for page, html in pages.items()}
        for page, html in pages.items():
            for anchor, times in anchors[page].items():
                self.expect(times == 1, f"{page}: the anchor #{anchor} occurs {times} times")
            for tag, _, href in {*re.findall(r"""<([a-z]+)\s[^<>]*?(href|src)=["']?([^"'\s>]*)""",
                                             html)}:
                path, _, anchor = href.partition("#")
                there = anchors.get(path or page)
                # A page may link to other sites, but must not load anything from them.
                good = (tag == "a" and "://" in href) or path in beside or href.startswith("data:")
                good = good or (there is not None and (anchor in there if anchor else path))
                self.expect(good, f"{page}: a link to {href} leads nowhere")
            levels = [int(level) for level in re.findall(r"<h([1-6])\b", html)]
            self.expect(all(below <= above + 1 for above, below in pairwise([0, *levels])),
                        f"{page}: a heading skips a level: {levels}")
            for figure in re.findall(r"<figure\b.*?</figure>", html, re.DOTALL):
                self.expect(re.search(ORIGIN, figure), f"{page}: a figure does not say which run "
                            f"it is from: {figure[:80]}")
        self.check_length()
        for source in self.chapters:
            for row in source.rows:
                public = row.name and (row.level == 2 or row.level == 3)
                self.expect(not public or (source.key, row.name) in self.proofs,
                            f"{source.path.name}: no test proves `{row.name}`")

    def check_length(self) -> None:
        """
        ### Check that the path and the book are no longer than their readers have time for
        """
        path = [item.path for chapter in contents.PATH for item in chapter.path]
        chapters = (*contents.PATH, *contents.FURTHER, *contents.appendix()[:2])
        read = [item.path for chapter in chapters for item in chapter.items
                if item.path.startswith("zero3/") or item.path.endswith(".md")]
        for what, pages, most_words, most_lines in (
                ("path", path, PATH_WORDS, PATH_LINES), ("book", read, BOOK_WORDS, None)):
            counted = [words_and_lines(self.bodies.get(page_of(each), "")) for each in pages]
            words, lines = (sum(each) for each in zip(*counted, strict=True))
            self.expect(words <= most_words and lines <= (most_lines or lines),
                        f"the {what} has {words:,} words and {lines:,} lines of code, and may have "
                        f"{most_words:,} words and {most_lines or lines:,} lines")


def meant(table: str) -> str:
    """
    ## A table, its numbers in the colours of what they are

    The head of the column says what they are, a shard for instance, or the first cell of the row.
    If a column says what a rank *has* before a collective, its numbers are the input of what the
    row says: the shards of a gather, the gradients of a reduce.
    """
    heads = re.findall("<th.*?</th>", table, re.DOTALL)

    def row(found: re.Match) -> str:
        cells = re.findall("<td.*?</td>", found[0], re.DOTALL)
        kind = kind_of(cells[0]) if cells else ""
        for i, (cell, above) in enumerate(zip(cells, heads, strict=False)):
            own = kind_of(above) or (INPUTS.get(kind, kind) if " has<" in above else kind)
            if "rank" in above:
                cell = re.sub(r">([\d.]+)<", r'><span class="num">\1</span><', cell)
            cells[i] = cell.replace('class="num"', f'class="num {own}"')
        return f"<tr>{''.join(cells)}</tr>" if cells else found[0]

    return re.sub("<tr>.*?</tr>", row, table, flags=re.DOTALL)


def cards(table: str) -> str:
    """
    ## A wide table whose cells name their columns, so that a phone can show each row as a card
    """
    heads = [plain(cell) for cell in re.findall("<th.*?</th>", table, re.DOTALL)]

    def row(found: re.Match) -> str:
        first, *others = re.findall("<td>(.*?)</td>", found[0], re.DOTALL) or [""]
        cells = (f'<td data-head="{escape(head)}"><span>{cell}</span></td>' if cell else "<td></td>"
                 for head, cell in zip(heads[1:], others, strict=True))
        return f"<tr><td>{first}</td>{''.join(cells)}</tr>" if others else found[0]

    return re.sub("<tr>.*?</tr>", row, table, flags=re.DOTALL)


def kind_of(cell: str) -> str:
    """
    ## The colour of what a cell of a table names, or an empty text
    """
    text = re.sub("<[^>]*>", "", cell)
    return next((kind for word, kind in MEANT.items() if re.search(word, text)), "")


def head(prose: str, lines: list[int], imports: str, rest: str) -> str:
    """
    ## The head of a file: its prose alone, its imports folded, and the rest of the code

    * `lines` are the numbers of the imports' lines
    """
    if lines:
        imports = (f'<details class="imports"><summary>Imports, lines {lines[0]} to {lines[-1]}'
                   f"</summary>{imports}</details>")
    return f'<section class="head"><div class="text">{limits(prose)}</div>{imports}{rest}</section>'


def limits(prose: str) -> str:
    """
    ## Fold what a chapter does not cover, if it is long

    At the head of a file a reader wants to see the code, and at its end to go on.
    """
    before, _, after = prose.partition("<p><strong>Not covered, and what that costs</strong>:")
    if len(after) <= LONG:
        return prose
    after = re.sub(r"^\s*([a-z])", lambda letter: letter[1].upper(), after)
    return (f'{before}<details class="limits"><summary>Not covered, and what that costs'
            f"</summary><p>{after}</details>")


def sections(source: Source, rows: list[Row]) -> Iterator[tuple[str, list[Row]]]:
    """
    ## Rows that belong to one function, with its name

    Rows between functions have no name.
    """
    name = ""
    found: list[Row] = []
    for row in rows:
        inside = bool(name) and not row.name and all(n in source.span(name) for n in row.lines)
        if not inside or row.prose.startswith("*"):
            if found:
                yield name, found
            name = row.name
            found = []
        found.append(row)
    if found:
        yield name, found


def folded(source: Source, name: str, html: str) -> str:
    """
    ## A function that only checks, folded

    A reader of the main line can pass over it.
    """
    title = source.sections[name].heading or name
    lines = source.span(name)
    return (f'<details class="folded"><summary>{escape(title)} <small>{escape(name)}, lines '
            f"{lines.start} to {lines.stop - 1}</small></summary>{html}</details>")


def beside(row: Row, prose: str, code: str) -> str:
    """
    ## A row: prose beside its code

    If there is a figure, or much to read about a line or two, the prose stands above the code.
    Otherwise the figure would be small, or the column of the code empty.
    """
    kind = "row"
    prose = limits(prose)
    if "<figure" in prose or len(row.prose) > 500 + 250 * len(row.lines):
        kind = "row above"
    if not row.lines and row.prose.startswith("*"):
        # The title of a part of the file.
        kind = "row part"
    return f'<section class="{kind}"><div class="prose">{prose}</div>{code}</section>'


def plain(html: str) -> str:
    """
    ## The text of HTML, in one line
    """
    return " ".join(unescape(re.sub("<wbr>|<[^>]*>", "", html)).split())


def found(pattern: str) -> list[str]:
    return [item.path for item in contents.found(pattern)]


@contextmanager
def uncollected() -> Iterator[None]:
    """
    ## Switch off the collector of cycles

    The syntax trees and tokens of all files are needed until the end. The collector would search
    them for garbage again and again, which takes a quarter of the time of a build.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def main(argv: list[str] | None = None) -> int:
    """
    ## Build the site, or list the problems
    """
    parser = argparse.ArgumentParser(prog="docs.build", description="Build the site.")
    parser.add_argument("--out", type=Path, default=ROOT / "build/site", help="output folder")
    out = parser.parse_args(argv).out
    with uncollected():
        site = Site(Figures())
        pages = site.build()
        site.check(pages)
    problems = sorted({*site.problems, *site.figures.problems})
    if problems:
        print("\n".join(problems), f"\n{len(problems)} problems; nothing was written")
        return 1
    if out.exists() and any(out.iterdir()) and not (out / "search.js").exists():
        parser.error(f"expected an empty folder or an earlier build, got {out}")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for page, html in pages.items():
        (out / page).write_text(html)
    for file in (file for pattern in STYLES for file in ROOT.glob(pattern)):
        shutil.copy(file, out)
    (out / "search.js").write_text(site.search_index())
    site.figures.write(out)
    print(f"wrote {len(pages)} pages to {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
