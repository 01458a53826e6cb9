r"""
# The notes about FSDP2 and DeepSpeed

`notes` reads `elsewhere.md`, which says for some sections of the source how two other libraries do
the same. `problems` compares its links with the source of a library.

The site shows each note twice: on the page of `elsewhere.md`, and folded beside its section. A note
about another library goes out of date with that library's next release. So each statement links to
a function in a certain version, and a test looks for the function there.

An entry has a title, the name of a section, and a paragraph for each library. The paragraph begins
with the library's name, and its links are on lines of their own:

| in `elsewhere.md` | meaning |
|---|---|
| `### Freeing memory that has views` | the title |
| `InFlight.free` in backticks, alone on its line | the section of our source |
| **FSDP2** and one or two sentences | the statement |
| a link with a function, to `blob/v2.13.0/...#L1072` | where it was read |

$$\text{line in the link} = \text{first line of the function in that version}$$

**Run this**: `python -m docs.elsewhere` compares the notes with the torch that is installed, and
`python -m docs.elsewhere --deepspeed DIR` with the folder of an installed DeepSpeed.

**Not covered, and what that costs**: whether a statement is true. If a function keeps its name and
changes what it does, no test notices. Read the function again when you change a version.
"""

import argparse
import ast
import re
import sys
from pathlib import Path
from typing import NamedTuple

import torch

NOTES = Path(__file__).with_name("elsewhere.md")
LIBRARIES = ("FSDP2", "DeepSpeed")
# In a repository and on disk a file has different folders.
FOLDERS = {"torch/": "", "deepspeed/": "", "csrc/": "ops/csrc/"}
LINK = re.compile(r"\[`([^`]+)`\]\((\S+)/blob/v([\d.]+)/(\S+)#L(\d+)\)")


class Place(NamedTuple):
    """
    ## A function of another library
    """

    function: str  # its qualified name
    repository: str
    version: str
    path: str  # of the file in the repository
    line: int  # the first of the function


def notes(path: Path = NOTES) -> dict[str, str]:
    """
    ## The notes as markdown, by the name of the section that they belong to

    Raises `ValueError` if an entry names no section, or if two entries name the same one.
    """
    found: dict[str, str] = {}
    for entry in re.split(r"^### ", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        # The entry ends at the title of the next part.
        title, _, body = re.split(r"^## ", entry, flags=re.MULTILINE)[0].partition("\n")
        named = re.match(r"\s*`([^`]+)`\n\n", body)
        if named is None or named[1] in found:
            raise ValueError(f"{path.name}: `{title}` needs the name of a section, and one that no "
                             "other entry has")
        found[named[1]] = body[named.end() :].strip()
    return found


def statements(note: str) -> dict[str, str]:
    """
    ## What a note says about each library, without its links
    """
    found: dict[str, str] = {}
    for paragraph in note.split("\n\n"):
        library, _, text = paragraph.removeprefix("**").partition("** ")
        found[library] = re.sub(r"[\\;\s]+$", "", LINK.sub("", text).replace("\n", " "))
    return found


def places(note: str) -> list[Place]:
    """
    ## The functions that a note links to
    """
    return [Place(function, repository, version, path, int(line))
            for function, repository, version, path, line in LINK.findall(note)]


def line_of(source: Path, function: str) -> int | None:
    """
    ## The first line of a function or a class, or `None` if the file does not define it

    * `function` is its qualified name
    """
    text = source.read_text(encoding="utf-8")
    if source.suffix == ".cpp":
        begins = re.search(rf"^\w[\w :*&<>]*\b{function}\((?![^{{]*;)", text, re.MULTILINE)
        return text.count("\n", 0, begins.start()) + 1 if begins else None
    node: ast.AST = ast.parse(text)
    for name in function.split("."):
        inside = [child for child in ast.walk(node) if child is not node
                  and isinstance(child, ast.ClassDef | ast.FunctionDef) and child.name == name]
        if not inside:
            return None
        node = inside[0]
    return int(node.lineno)  # type: ignore[attr-defined]


def problems(root: Path, repository: str, version: str) -> list[str]:
    """
    ## The links that do not fit the installed source of a library

    * `root` is the folder of the installed package
    * `repository` is the end of the repository's address: "pytorch", or "DeepSpeed"
    * `version` is the installed one. Another release may have shifted the lines, so lines are
      compared only with the version that was read
    """
    wrong = []
    linked = {place for note in notes().values() for place in places(note)}
    for place in sorted(place for place in linked if place.repository.endswith(f"/{repository}")):
        folder = next(folder for folder in FOLDERS if place.path.startswith(folder))
        source = root / FOLDERS[folder] / place.path.removeprefix(folder)
        line = line_of(source, place.function) if source.exists() else None
        same = line == place.line or (line and version != place.version)
        if not same:
            wrong.append(f"{place.path}: `{place.function}` of {place.version} is at line "
                         f"{place.line}, and of {version} at {line or 'none'}")
    return wrong


def installed_torch() -> str:
    """
    ## The version of torch, without the suffix of its build
    """
    return torch.__version__.partition("+")[0]


def main(argv: list[str] | None = None) -> int:
    """
    ## Compare the links with the installed libraries
    """
    parser = argparse.ArgumentParser(prog="docs.elsewhere", description="Compare the links of the "
                                     "notes with the installed libraries.")
    parser.add_argument("--deepspeed", type=Path, help="folder of an installed DeepSpeed")
    deepspeed = parser.parse_args(argv).deepspeed
    wrong = problems(Path(torch.__file__).parent, "pytorch", installed_torch())
    if deepspeed is not None:
        version = re.search(r"version='([\d.]+)",
                            (deepspeed / "git_version_info_installed.py").read_text())
        wrong += problems(deepspeed, "DeepSpeed", version[1] if version else "unknown")
    print("\n".join(wrong) or f"{len(notes())} notes, and every link leads to its function")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
