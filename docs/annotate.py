"""
# Source in two columns

`Source` cuts a Python file into rows: prose on the left, the lines that it is about on the right.

The prose is the file's own docstrings and comments. A row begins where a class or a function with a
docstring begins, and where a comment stands on lines of its own; it takes the lines up to the next
beginning. So each line of a file is on its page once, in one of the two columns, and the page can
not say anything that the source does not.

Names in the code lead to what they name. Python's own parser says where a name stands, and in which
function; what it refers to is found without running anything: a name of this file or one that it
imports, a method of the class around, or one that only one class of the package has.

**Run this**: `make docs`.

**Not covered, and what that costs**: a name that two classes have leads nowhere unless it is
`self`'s; types are not inferred.
"""

import ast
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from html import escape
from io import StringIO
from pathlib import Path

import torch
from pygments.lexers import PythonLexer
from pygments.token import STANDARD_TYPES, Token

Defined = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def slug(heading: str) -> str:
    """
    ## The anchor of a heading
    """
    return re.sub(r"[^a-z0-9]+", "-", heading.lower()).strip("-")


@dataclass
class Row:
    """
    ## Some prose, and the lines beside it
    """

    prose: str  # markdown
    name: str = ""  # qualified, of the class or function that begins here
    lines: list[int] = field(default_factory=list)  # of code; the first line of a file is 1

    @property
    def heading(self) -> str:
        found = re.match(r"(?:#+) (.+)", self.prose)
        return found[1] if found else ""

    @property
    def level(self) -> int:
        return len(self.prose) - len(self.prose.lstrip("#"))

    @property
    def anchor(self) -> str:
        return slug(self.heading) if self.heading else self.name


class Source:
    """
    ## A Python file
    """

    def __init__(self, path: Path, page: str = ""):
        """
        ### Parse it

        * `page` is the name of its page

        Raises `ValueError` if a line would be in no row, or in two.
        """
        self.path, self.page = path, page
        # By which names refer to it: the file's, or the folder's of a command line.
        self.key = path.parent.name if path.stem == "__main__" else path.stem
        self.text = path.read_text()
        self.texts = self.text.split("\n")
        self.tree = ast.parse(self.text)
        # Of all that is defined here: the qualified name, and where it begins.
        self.defined = dict(_definitions(self.tree))
        self.rows = list(self._rows())
        # The rows that begin a section, by its name.
        self.sections = {row.name: row for row in self.rows if row.name}

    def _rows(self) -> Iterator[Row]:
        """
        #### Cut into rows
        """
        begins: dict[int, Row] = {}
        spoken: dict[int, Row] = {}  # by whom a line of prose is said
        for name, node in (("", self.tree), *self.defined.items()):
            first = node.body[0]
            if (prose := ast.get_docstring(node)) is not None:
                begin = self.span(name).start if name else 1
                begins[begin] = Row(prose, name)
                spoken |= dict.fromkeys(range(first.lineno, first.end_lineno + 1), begins[begin])
        for line, comment in _comments(self.text):
            begins[line] = Row(_joined(comment))
            spoken |= dict.fromkeys(range(line, line + len(comment)), begins[line])
        row = begins.setdefault(1, Row(""))
        for number, text in enumerate(self.texts, 1):
            row = begins.get(number, row)
            if number not in spoken and text.strip():
                row.lines.append(number)
        shown = Counter(number for row in begins.values() for number in row.lines)
        for number, text in enumerate(self.texts, 1):
            words = re.sub(r'^(# -{3,}|#|r?""")|"""$', "", text.strip()).strip()
            said = spoken.get(number)
            # Of two rows that begin in one line the first is lost.
            times = shown[number] if said is None else sum(
                row is said and words in row.prose for row in begins.values())
            if text.strip() and times != 1:
                raise ValueError(f"{self.path}: line {number} is on the page {times} times")
        yield from (begins[number] for number in sorted(begins))

    def span(self, name: str) -> range:
        """
        ### The lines of a class or a function

        A decorator belongs to what it decorates.
        """
        node = self.defined[name]
        first = min(part.lineno for part in (node, *node.decorator_list))
        return range(first, (node.end_lineno or first) + 1)

    def anchor_of(self, name: str) -> str:
        """
        ### Where something that is defined here is on the page
        """
        row = self.sections.get(name)
        return row.anchor if row else f"L{self.defined[name].lineno}"

    def digest(self) -> str:
        """
        ### What the code is, whatever the prose says

        A timing is of the code that ran, and no longer true when that has changed.
        """
        lines = [self.texts[number - 1] for row in self.rows for number in row.lines]
        return sha256("\n".join(lines).encode()).hexdigest()[:16]

    def code(self, row: Row, links: dict[tuple[int, int], str]) -> str:
        """
        ### The lines of a row as HTML

        * `links` has the address of what stands at a line and a column
        """
        return "".join(
            f'<span class="line" id="L{number}"><a class="ln" href="#L{number}" data-n="{number}" '
            f'aria-label="line {number}"></a>{self._colored(number, links)}\n</span>'
            for number in row.lines)

    def _colored(self, number: int, links: dict[tuple[int, int], str]) -> str:
        """
        #### One line, its tokens in spans, its names linked
        """
        parts, column = [], 0
        for kind, text in self._tokens()[number]:
            html = escape(text, quote=False)
            if target := links.get((number, column)):
                html = f'<a href="{escape(target)}">{html}</a>'
            short = STANDARD_TYPES.get(kind, "")
            parts.append(f'<span class="{short}">{html}</span>' if short and text.strip() else html)
            column += len(text)
        return "".join(parts)

    def _tokens(self) -> dict[int, list]:
        """
        #### The tokens of each line

        The whole file is read at once, for a string may go over several lines.
        """
        if not hasattr(self, "_by_line"):
            self._by_line, number = defaultdict(list), 1
            for kind, text in PythonLexer(stripnl=False, ensurenl=False).get_tokens(self.text):
                # Pygments has a word of its own for names that Python brings along.
                kind = Token.Name if kind is Token.Name.Builtin.Pseudo else kind
                for i, piece in enumerate(text.split("\n")):
                    number += i > 0
                    if piece:
                        self._by_line[number].append((kind, piece))
        return self._by_line


def _definitions(node: ast.AST, around: str = "") -> Iterator[tuple[str, Defined]]:
    """
    #### All classes and functions in a piece of source, with qualified names
    """
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Defined):
            yield around + child.name, child
            yield from _definitions(child, f"{around}{child.name}.")
        else:
            yield from _definitions(child, around)


def _comments(text: str) -> Iterator[tuple[int, list[str]]]:
    """
    #### Comments that have lines of their own, with the first line of each
    """
    block: list[str] = []
    first = 0
    for token in tokenize.generate_tokens(StringIO(text).readline):
        if token.type == tokenize.COMMENT and token.line.strip() == token.string:
            if block and token.start[0] != first + len(block):
                yield first, block
                block = []
            first = first if block else token.start[0]
            block.append(token.string)
    if block:
        yield first, block


def _joined(comment: list[str]) -> str:
    """
    #### A comment as markdown; a line of hyphens with a word is the name of a part
    """
    if part := re.fullmatch(r"# -{3,} (.+)", comment[0]):
        return f"*{part[1]}*\n" + _joined(comment[1:]) if comment[1:] else f"*{part[1]}*"
    return "\n".join(line[1:].removeprefix(" ") for line in comment)


class Names:
    """
    ## What names refer to
    """

    def __init__(self, sources: list[Source]):
        """
        ### Collect what the files define

        A method is found by its own name too, where only one class has it, and nothing else is
        called so: no variable, no attribute, nothing of torch's or of Python's own types.
        """
        self.sources = {source.key: source for source in sources}
        self.found: dict[str, set[tuple[str, str]]] = defaultdict(set)
        others = {name for kind in (torch.Tensor, torch.nn.Module, torch.optim.Optimizer, Path, str,
                                    list, dict, set) for name in dir(kind)}
        for node in (node for source in sources for node in ast.walk(source.tree)):
            stored = isinstance(getattr(node, "ctx", None), ast.Store)
            others.add(node.attr if stored and isinstance(node, ast.Attribute) else
                       getattr(node, "id", getattr(node, "arg", None)))
        classes = {name: node for source in sources for name, node in source.defined.items()
                   if isinstance(node, ast.ClassDef)}
        for stem, source in self.sources.items():
            for name in source.defined:
                of, _, short = name.rpartition(".")
                # A method by its own name is that of the class which has it first.
                inherited = {node.name for base in getattr(classes.get(of), "bases", ())
                             for node in getattr(classes.get(getattr(base, "id", "")), "body", ())
                             if isinstance(node, ast.FunctionDef)}
                for each in {name, f"{stem}.{name}"} | {short} - inherited - others:
                    self.found[each].add((stem, name))

    def find(self, name: str, source: Source | None = None) -> tuple[str, str] | None:
        """
        ### The file and the qualified name of what is meant, or `None` where that is not certain

        * `source` is the file in which it stands, whose own things come first
        """
        found = self.found.get(name, set())
        here = {one for one in found if source and one[0] == source.key}
        # Of a function and one inside of another by the same name, the outer one is meant.
        for some in (here, found):
            best = [one for one in some if one[1] == name] or list(some)
            if len(best) == 1:
                return best[0]
        return None

    def address(self, stem: str, name: str, at: Source | None = None) -> str:
        """
        ### The link to something, from a page
        """
        source = at if at and at.key == stem else self.sources[stem]
        page = "" if at is source else source.page
        return f"{page}#{source.anchor_of(name)}"

    def links(self, source: Source) -> dict[tuple[int, int], str]:
        """
        ### Where the names in a file lead, by line and column
        """
        found: dict[tuple[int, int], str] = {}
        imported = {alias.asname or alias.name: (node.module.split(".")[-1], alias.name)
                    for node in ast.walk(source.tree) if isinstance(node, ast.ImportFrom)
                    for alias in node.names if (node.module or "").startswith("zero3")}

        def look(node: ast.AST, around: str, bound: frozenset[str]) -> None:
            if isinstance(node, ast.FunctionDef):
                bound = bound | _bound(node)
            target, line, end = None, 0, 0
            if isinstance(node, ast.Name) and node.id not in bound:
                name, line, end = node.id, node.end_lineno, node.end_col_offset
                target = (imported.get(name) if name in imported else
                          (source.key, name) if name in source.defined else None)
            elif isinstance(node, ast.Attribute):
                name, line, end = node.attr, node.end_lineno, node.end_col_offset
                target = self._attribute(node, around, imported, source)
            there = source if target and target[0] == source.key else self.sources.get(
                target[0] if target else "")
            if target and there and target[1] in there.defined:
                text = source.texts[line - 1].encode()[:end].decode(errors="ignore")
                # Before Python 3.12 a place inside of an f-string is not where the parser says.
                if text.endswith(name):
                    at = (line, len(text) - len(name))
                    found[at] = self.address(*target, source)
            for child in ast.iter_child_nodes(node):
                inner = isinstance(child, ast.ClassDef)
                look(child, child.name if inner else around, bound)

        look(source.tree, "", frozenset())
        return found

    def _attribute(self, node: ast.Attribute, around: str, imported: dict, source: Source
                   ) -> tuple[str, str] | None:
        """
        #### What `something.name` is
        """
        owner = node.value.id if isinstance(node.value, ast.Name) else ""
        if owner == "self" and f"{around}.{node.attr}" in source.defined:
            return source.key, f"{around}.{node.attr}"
        if owner in imported and imported[owner][1] in self.sources:
            # A module, as in `gpt.sample`.
            return imported[owner][1], node.attr
        one = self.find(node.attr)
        # Only a method: what a function is called, something else may have for an attribute.
        return one if one and "." in one[1] else None


def _bound(function: ast.FunctionDef) -> set[str]:
    """
    #### The names that a function gives to things of its own
    """
    return {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)} | {
        node.id for node in ast.walk(function)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
