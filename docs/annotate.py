"""
# Source in two columns

`Source` divides a Python file into rows, with prose on the left and the code it explains on the
right.

The prose consists of the file's own docstrings and comments. A row begins at a class or a function
with a docstring, and at a comment on lines of its own. It extends to the beginning of the next row.
So each line of the file appears once on its page, in one of the two columns, and nothing appears
that is not in the source.

Names in the code link to their definitions. Python's parser gives the position of a name and the
function around it. The definition is found without running anything: a name may be defined in this
file or imported by it, or be a method of the surrounding class, or of the only class in the package
that has it.

**Run this**: `make docs`.

**Not covered, and what that costs**: types are not inferred. A method that two classes define gets
no link, unless it is called on `self`.
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


class Lexer(PythonLexer):
    """
    ## Pygments' lexer, which first tries what is there most often

    It tries its rules one after the other at each token, and those of spaces and signs come behind
    forty others, none of which begins with one of these. At the beginning of a line a space may
    belong to a docstring.
    """

    tokens = {**PythonLexer.tokens, "root": [
        (r"(?<=\S)[^\S\n]+", Token.Text),
        (r"[]{}(),;[]|:(?!=)", Token.Punctuation),
        (r"\.(?!\d)|=(?!=)", Token.Operator),
        *PythonLexer.tokens["root"]]}


def slug(heading: str) -> str:
    """
    ## The anchor of a heading
    """
    return re.sub(r"[^a-z0-9]+", "-", heading.lower()).strip("-")


@dataclass
class Row:
    """
    ## Prose, and the lines of code beside it
    """

    prose: str  # markdown
    name: str = ""  # the qualified name of the class or function that begins here
    lines: list[int] = field(default_factory=list)  # numbers of the lines of code, from 1

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

        * `page` is the file name of its page

        Raises `ValueError` if a line would be in no row, or in two rows.
        """
        self.path = path
        self.page = page
        self.key = _key(path)
        self.text = path.read_text()
        self.texts = self.text.split("\n")
        self.tree = ast.parse(self.text)
        self.nodes = [*ast.walk(self.tree)]
        # All classes and functions of the file, by qualified name.
        self.defined = dict(_definitions(self.tree))
        self.rows = list(self._rows())
        # The row of each class or function, by qualified name.
        self.sections = {row.name: row for row in self.rows if row.name}

    def _rows(self) -> Iterator[Row]:
        """
        #### Cut into rows
        """
        begins: dict[int, Row] = {}
        spoken: dict[int, Row] = {}  # the row of each line of prose
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
            # If two rows begin in the same line, the first one is lost.
            times = shown[number] if said is None else sum(
                row is said and words in row.prose for row in begins.values())
            if text.strip() and times != 1:
                raise ValueError(f"{self.path}: line {number} is on the page {times} times")
        yield from (begins[number] for number in sorted(begins))

    @property
    def last_import(self) -> int:
        """
        ### The last line of the imports at the top of the file
        """
        lines = [node.end_lineno or 0 for node in self.tree.body
                 if isinstance(node, ast.Import | ast.ImportFrom)]
        return max(lines, default=0)

    def span(self, name: str) -> range:
        """
        ### The lines of a class or a function

        They include its decorators.
        """
        node = self.defined[name]
        first = min(part.lineno for part in (node, *node.decorator_list))
        return range(first, (node.end_lineno or first) + 1)

    def anchor_of(self, name: str) -> str:
        """
        ### The anchor of a class or a function on the page
        """
        row = self.sections.get(name)
        return row.anchor if row else f"L{self.defined[name].lineno}"

    def digest(self) -> str:
        """
        ### A digest of the code, without its prose

        Timings are stored with the digest of the code that ran, because they are out of date once
        the code has changed.
        """
        lines = [self.texts[number - 1] for row in self.rows for number in row.lines]
        return sha256("\n".join(lines).encode()).hexdigest()[:16]

    def code(self, lines: list[int], links: dict[tuple[int, int], str]) -> str:
        """
        ### Lines of code as HTML

        * `links` are addresses, by line and column of the linked name
        """
        return "".join(
            f'<span class="line" id="L{number}" style="--i:{self._indent(number)}">'
            f'<a class="ln" href="#L{number}" data-n="{number}" aria-label="line {number}"></a>'
            f"{self._colored(number, links)}\n</span>" for number in lines)

    def _indent(self, number: int) -> int:
        text = self.texts[number - 1]
        return len(text) - len(text.lstrip())

    def _colored(self, number: int, links: dict[tuple[int, int], str]) -> str:
        """
        #### One line, its tokens in spans, its names linked
        """
        parts = []
        column = 0
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

        The whole file is tokenised at once, because a string may span several lines.
        """
        if not hasattr(self, "_by_line"):
            self._by_line = defaultdict(list)
            number = 1
            for kind, text in Lexer(stripnl=False, ensurenl=False).get_tokens(self.text):
                # Pygments has a token type of its own for names such as `self`.
                kind = Token.Name if kind is Token.Name.Builtin.Pseudo else kind
                for i, piece in enumerate(text.split("\n")):
                    number += i > 0
                    if piece:
                        self._by_line[number].append((kind, piece))
        return self._by_line


def _key(path: Path) -> str:
    """
    #### The module name of a file in qualified names

    `__main__` goes by the name of its folder, unless another file there has that name.
    """
    folder = path.parent.name
    if path.stem == "__main__" and not path.with_name(f"{folder}.py").exists():
        return folder
    # The package itself has an `__init__`, too.
    is_alone = path.stem not in ("__init__", "__main__") or folder == "zero3"
    return path.stem if is_alone else f"{folder}.{path.stem}"


def _definitions(node: ast.AST, around: str = "") -> Iterator[tuple[str, Defined]]:
    """
    #### All classes and functions in a syntax tree, with qualified names
    """
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Defined):
            yield around + child.name, child
            yield from _definitions(child, f"{around}{child.name}.")
        elif not isinstance(child, ast.expr):
            # No expression contains a definition, and most of a tree are expressions.
            yield from _definitions(child, around)


def _comments(text: str) -> Iterator[tuple[int, list[str]]]:
    """
    #### Comments on lines of their own, with the number of the first line
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
    #### A comment as markdown; a line of hyphens with words is the title of a part
    """
    if part := re.fullmatch(r"# -{3,} (.+)", comment[0]):
        return f"*{part[1]}*\n" + _joined(comment[1:]) if comment[1:] else f"*{part[1]}*"
    return "\n".join(line[1:].removeprefix(" ") for line in comment)


class Names:
    """
    ## The definitions that names refer to
    """

    def __init__(self, sources: list[Source]):
        """
        ### Collect the definitions of the files

        A method can also be found by its short name. For this, only one class may define it, and
        nothing else may have the same name: no variable, no attribute, and no method of torch's
        classes or of Python's built-in types.
        """
        self.sources = {source.key: source for source in sources}
        self.found: dict[str, set[tuple[str, str]]] = defaultdict(set)
        others = {name for kind in (torch.Tensor, torch.nn.Module, torch.optim.Optimizer, Path, str,
                                    list, dict, set) for name in dir(kind)}
        for node in (node for source in sources for node in source.nodes):
            stored = isinstance(getattr(node, "ctx", None), ast.Store)
            others.add(node.attr if stored and isinstance(node, ast.Attribute) else
                       getattr(node, "id", getattr(node, "arg", None)))
        classes = {name: node for source in sources for name, node in source.defined.items()
                   if isinstance(node, ast.ClassDef)}
        for stem, source in self.sources.items():
            for name in source.defined:
                of, _, short = name.rpartition(".")
                # The short name of a method refers to the base class that defines it first.
                inherited = {node.name for base in getattr(classes.get(of), "bases", ())
                             for node in getattr(classes.get(getattr(base, "id", "")), "body", ())
                             if isinstance(node, ast.FunctionDef)}
                names = {f"{stem}.{name}"}
                # The minimal file has the heart's names, so its own are found by its name alone.
                if stem != "minimal":
                    names |= {name} | {short} - inherited - others
                for each in names:
                    self.found[each].add((stem, name))

    def find(self, name: str, source: Source | None = None) -> tuple[str, str] | None:
        """
        ### The file and the qualified name of a definition, or `None` if it is ambiguous

        * `source` is the file that uses the name; its own definitions have priority
        """
        if source and source.key == "minimal" and name in source.defined:
            return source.key, name
        found = self.found.get(name, set())
        here = {one for one in found if source and one[0] == source.key}
        # A function has priority over a nested function of the same name.
        for some in (here, found):
            best = [one for one in some if one[1] == name] or list(some)
            if len(best) == 1:
                return best[0]
        return None

    def address(self, stem: str, name: str, at: Source | None = None) -> str:
        """
        ### The link to a definition, from the page of `at`
        """
        # A test may have the name of a chapter.
        source = at if at and at.key == stem and name in at.defined else self.sources[stem]
        page = "" if at is source else source.page
        return f"{page}#{source.anchor_of(name)}"

    def links(self, source: Source) -> dict[tuple[int, int], str]:
        """
        ### The links of the names in a file, by line and column
        """
        found: dict[tuple[int, int], str] = {}
        imported = {alias.asname or alias.name: (node.module.split(".")[-1], alias.name)
                    for node in source.nodes if isinstance(node, ast.ImportFrom)
                    for alias in node.names if (node.module or "").startswith("zero3")}

        def look(node: ast.AST, around: str, bound: frozenset[str]) -> None:
            if isinstance(node, ast.FunctionDef):
                bound = bound | _bound(node)
            target = None
            if isinstance(node, ast.Name) and node.id not in bound:
                name = node.id
                target = (imported.get(name) if name in imported else
                          (source.key, name) if name in source.defined else None)
            elif isinstance(node, ast.Attribute):
                name = node.attr
                target = self._attribute(node, around, imported, source)
            there = source if target and target[0] == source.key else self.sources.get(
                target[0] if target else "")
            if target and there and target[1] in there.defined:
                # The parser counts bytes.
                before = source.texts[node.end_lineno - 1].encode()[: node.end_col_offset]
                text = before.decode(errors="ignore")
                # Before Python 3.12 the parser gives wrong positions inside of f-strings.
                if text.endswith(name):
                    at = (node.end_lineno, len(text) - len(name))
                    found[at] = self.address(*target, source)
            for child in ast.iter_child_nodes(node):
                inner = isinstance(child, ast.ClassDef)
                if not isinstance(child, ast.expr_context):
                    look(child, child.name if inner else around, bound)

        look(source.tree, "", frozenset())
        return found

    def _attribute(self, node: ast.Attribute, around: str, imported: dict, source: Source
                   ) -> tuple[str, str] | None:
        """
        #### The definition that `something.name` refers to
        """
        owner = node.value.id if isinstance(node.value, ast.Name) else ""
        if owner == "self" and f"{around}.{node.attr}" in source.defined:
            return source.key, f"{around}.{node.attr}"
        if owner in imported and imported[owner][1] in self.sources:
            # The owner is a module, as in `gpt.sample`.
            return imported[owner][1], node.attr
        one = self.find(node.attr)
        # Accept only methods: an attribute may have the same name as a function by chance.
        return one if one and "." in one[1] else None


def _bound(function: ast.FunctionDef) -> set[str]:
    """
    #### The names of a function's arguments and local variables
    """
    names: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names
