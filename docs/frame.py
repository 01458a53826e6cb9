"""
# The frame of a page

`Frame` puts a page into its place in the book: a sidebar with the path, a line that says which
chapter this is and how long the rest takes, and links to the neighbours.

A reader of page 2 of chapter 5 sees

| where | text |
|---|---|
| sidebar | the seven chapters; the pages of chapter 5 below its name |
| above the text | Chapter 5 of 7, *The heart*: page 2 of 4 · 11 min · then 80 min |
| at the foot | ← the first page of the chapter; its third page → |

The path leads through the pages that all readers need, chapter after chapter. Someone who turns off
to a page for more is led through the rest of that chapter, and from there on to the next one.

**Run this**: `make docs`.

**Not covered, and what that costs**: the frame does not know which pages somebody has read, because
a page that is opened from a file cannot reliably store it. So the minutes left are counted from the
place on the path.
"""

import re
from html import escape, unescape
from string import Template

from docs import contents
from docs.contents import ROOT, Chapter, Item, page_of
from docs.svg import stripes


class Frame:
    """
    ## The sidebar, the place and the neighbours of each page
    """

    def __init__(self, bodies: dict[str, str], headings: dict[str, list[tuple[int, str, str]]]):
        """
        ### Read the list of contents

        * `bodies` has the HTML of each page
        * `headings` has its headings, each with level, text and anchor
        """
        self.bodies = bodies
        self.headings = headings
        self.template = Template((ROOT / "docs/page.html").read_text())
        self.appendix = contents.appendix()
        # The chapters in reading order, and the place of each page: its chapter, and its number
        # within the chapter, from 0.
        self.chapters = (*contents.PATH, *contents.FURTHER, *self.appendix)
        self.places: dict[str, tuple[Chapter, int]] = {}
        for chapter in self.chapters:
            for i, item in enumerate(chapter.items):
                self.places[page_of(item.path)] = chapter, i
        self.minutes = {page: minutes(body) for page, body in bodies.items()}

    def title(self, page: str) -> str:
        """
        ### The title of a page
        """
        own = (text for level, text, _ in self.headings.get(page, ()) if level == 1)
        return next(own, page.removesuffix(".html"))

    def framed(self, page: str) -> str:
        """
        ### A complete page
        """
        before, after = self.neighbours(page)
        chapter, i = self.places.get(page, (None, 0))
        file = chapter.items[i].path.removeprefix("zero3/") if chapter else ""
        about = chapter and re.sub("[`*$]", "", chapter.items[i].about)
        inside = "".join(f'<li class="h{level}"><a href="#{anchor}">{escape(text)}</a></li>'
                         for level, text, anchor in self.headings.get(page, ()) if level > 1)
        return self.template.substitute(
            title=escape(self.title(page)), pages=self.sidebar(page), contents=inside,
            stripes=stripes(), place=self.place(page), body=self.bodies[page],
            file=file, more=self.more(page),
            about=escape(f"{about or 'ZeRO-3 to read and to run'}. A page of the book of zero3."),
            before=self.link(before, "before"), after=self.link(after, "after"))

    # ---------------------------------------------------------------------------------- the place

    def place(self, page: str) -> str:
        """
        ### The line above the text: which chapter this is, and how long the rest takes
        """
        if page not in self.places:
            return ""
        chapter, i = self.places[page]
        parts = self.pages_and_minutes(chapter, i, page)
        if chapter in contents.PATH:
            where = f"Chapter {contents.PATH.index(chapter) + 1} of {len(contents.PATH)}"
            if i >= chapter.core:
                where = f"More in chapter {contents.PATH.index(chapter) + 1}"
        elif chapter in contents.FURTHER:
            where = "Further chapter"
        else:
            where = "Appendix"
            parts = parts[:1]
        name = escape(chapter.name)
        linked = f'<a href="{page_of(chapter.first.path)}">{name}</a>' if i else name
        return f'<p class="place"><b>{where}: {linked}</b> · {" · ".join(parts)}</p>'

    def pages_and_minutes(self, chapter: Chapter, i: int, page: str) -> list[str]:
        """
        ### The number of a page, its minutes, and those that are left on the path
        """
        parts = []
        on_path = chapter in contents.PATH and i < chapter.core
        if on_path and chapter.core > 1:
            parts.append(f"page {i + 1} of {chapter.core}")
        elif chapter not in contents.PATH:
            parts.append(f"page {i + 1} of {len(chapter.items)}")
        parts.append(f"{self.minutes[page]} min")
        if on_path:
            order = [page_of(item.path) for each in contents.PATH for item in each.path]
            left = sum(self.minutes[each] for each in order[order.index(page) + 1 :])
            told = f"{left} min" if left < 90 else f"about {left / 60:.0f} hours"
            parts += [f"then {told} to the end of the path"] * bool(left)
        return parts

    def sidebar(self, page: str) -> str:
        """
        ### All chapters, with the pages of the one that is open
        """
        here = self.places.get(page, (None, 0))[0]
        path = "".join(self._entry(each, here, page) for each in contents.PATH)
        further = "".join(self._entry(each, here, page) for each in contents.FURTHER)
        # Tests and the source of the book are reached by links, and are in the menu of their pages.
        looked_up = [each for each in self.appendix if each is here or each.first.about]
        appendix = "".join(self._entry(each, here, page) for each in looked_up)
        return (f'<p>The path</p><ol class="path">{path}</ol><p>Further chapters</p>'
                f"<ul>{further}</ul><p>Appendix</p><ul>{appendix}</ul>")

    def _entry(self, chapter: Chapter, here: Chapter | None, page: str) -> str:
        """
        #### A chapter in the sidebar
        """
        first = page_of(chapter.first.path)
        current = ' aria-current="page"' * (first == page)
        inside = ""
        if chapter is here and len(chapter.items) > 1:
            inside = "".join(self._line(item, page) for item in chapter.items[1:])
            inside = f"<ul>{inside}</ul>"
        name = escape(chapter.name)
        state = ' class="here"' * (chapter is here)
        return f'<li{state}><a href="{first}"{current}>{name}</a>{inside}</li>'

    def _line(self, item: Item, page: str) -> str:
        """
        #### A page below its chapter
        """
        other = page_of(item.path)
        current = ' aria-current="page"' * (other == page)
        return f'<li><a href="{other}"{current}>{escape(self.short(item))}</a></li>'

    def short(self, item: Item) -> str:
        """
        ### What a page is called in a list: its title, or its file's name in the appendix
        """
        title = self.title(page_of(item.path))
        if item.path.endswith(".ipynb"):
            return f"Notebook: {title}"
        if item.about or "/exercises/ex" in item.path:
            return title
        return item.path.removeprefix("docs/").removeprefix("tests/")

    def path(self) -> str:
        """
        ### The path as a list, with the minutes of each chapter, for the index
        """
        items = []
        for chapter in contents.PATH:
            page = page_of(chapter.first.path)
            minutes = sum(self.minutes[page_of(item.path)] for item in chapter.path)
            items.append(f'<li><a href="{page}">{escape(chapter.name)}</a> '
                         f"<span>{escape(chapter.about)}</span> "
                         f"<small>{minutes} min</small></li>")
        return f'<ol class="path-list">{"".join(items)}</ol>'

    # ----------------------------------------------------------------------------- the neighbours

    def neighbours(self, page: str) -> tuple[str, str]:
        """
        ### The pages before and after, or an empty text at either end
        """
        if page not in self.places:
            return "", page_of(self.chapters[0].first.path)
        main = ["index.html", *(page_of(item.path) for each in self.chapters
                                for item in self.main_pages(each))]
        chapter, i = self.places[page]
        if page in main:
            at = main.index(page)
            return main[at - 1], ([*main, ""])[at + 1]
        pages = [page_of(item.path) for item in chapter.items]
        last = main.index(pages[chapter.core - 1])
        after = pages[i + 1] if i + 1 < len(pages) else ([*main, ""])[last + 1]
        return pages[i - 1], after

    def main_pages(self, chapter: Chapter) -> tuple[Item, ...]:
        """
        ### The pages that the footers lead through: off the path, all of a chapter
        """
        return chapter.path if chapter in contents.PATH else chapter.items

    def more(self, page: str) -> str:
        """
        ### At the foot of the last page of a chapter that all readers need: the other pages
        """
        chapter, i = self.places.get(page, (None, 0))
        if chapter not in contents.PATH or i != chapter.core - 1 or not chapter.more:
            return ""
        items = "".join(
            f'<li><a href="{page_of(item.path)}">{escape(self.short(item))}</a> '
            f"<small>{self.minutes[page_of(item.path)]} min</small></li>" for item in chapter.more)
        return ('<nav class="more" aria-label="More in this chapter"><p>More in this chapter</p>'
                f"<ul>{items}</ul></nav>")

    def link(self, page: str, name: str) -> str:
        """
        ### A link to a neighbour, with the number of its chapter if it begins one
        """
        if not page:
            return ""
        chapter, i = self.places.get(page, (None, 0))
        title = self.title(page)
        if chapter and not i:
            title = chapter.name
            if chapter in contents.PATH:
                title = f"{contents.PATH.index(chapter) + 1}. {title}"
        return f'<a rel="{name}" href="{page}">{escape(title)}</a>'


def minutes(html: str) -> int:
    """
    ## How long it takes to read a page
    """
    return contents.minutes(*words_and_lines(html))


def words_and_lines(html: str) -> tuple[int, int]:
    """
    ## The words and the lines of code that a reader of a page meets

    Folded parts, pictures and the output of notebooks are left out.
    """
    # A name may be broken over two lines there, and is one word.
    html = html.replace("<wbr>", "")
    while "<details" in html:
        html = re.sub(r"<details\b((?!<details\b).)*?</details>", " ", html, flags=re.DOTALL)
    lines = html.count('<span class="line"')
    cells = re.findall(r'<pre class="cell">.*?</pre>', html, re.DOTALL)
    lines += sum(cell.count("\n") for cell in cells)
    for tag in ("pre", "svg", "math"):
        html = re.sub(rf"<{tag}\b.*?</{tag}>", " ", html, flags=re.DOTALL)
    words = unescape(re.sub(r"<[^>]*>", " ", html)).split()
    return len(words), lines
