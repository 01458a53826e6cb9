"""
# The house: which file may know which

The order of files and folders is a claim of the package's map. Here it is a test.
"""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "zero3"
# From the ground up: a file imports only files of its own row or of rows above it.
ROWS = (
    {"guards"},
    {"files"},
    {"flat", "watch"},
    {"comm", "offload"},
    {"sharded"},
    {"schedule"},
    {"layer"},
    {"measure", "estimate"},
    {"optimizer"},
    {"whole_model"},
    {"checkpoint"},
    {"train"},
)
# The map imports by name what somebody asks for, and `offload` has a command line.
LAZY = {"__init__"}


def modules():
    """Every module of the package by its dotted name, parsed"""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        if path.stat().st_size:
            found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def imported(tree, known):
    """The modules of the package that one imports, at its top or inside a function"""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "zero3":
            inside = (node.module or "").removeprefix("zero3").lstrip(".")
            for alias in node.names:
                full = f"{inside}.{alias.name}".lstrip(".")
                yield full if full in known else inside or "__init__"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "zero3":
                    yield alias.name.removeprefix("zero3").lstrip(".") or "__init__"


def test_no_file_imports_one_that_imports_it():
    """
    Over all files, imports inside of functions included. Breaks if any two files, or a ring of
    them, know each other.
    """
    known = modules()
    graph = {name: set(imported(tree, known)) for name, tree in known.items()}
    order = list(TopologicalSorter(graph).static_order())
    assert set(known) <= set(order) and len(order) == len(set(order))


def test_every_arrow_points_down():
    """
    A file knows files of its own room and of rooms below, never of a room above. Breaks if the
    heart imports a chapter that comes after it, or a part the heart that uses it.
    """
    known = modules()
    rooms = {room: height for height, row in enumerate(ROWS) for room in row}
    for name, tree in known.items():
        if name in LAZY:
            continue
        for other in imported(tree, known):
            here, there = name.split(".")[0], other.split(".")[0]
            assert rooms[there] < rooms[here] or here == there, f"{name} imports {other}"


def test_no_private_name_is_used_in_another_file():
    """
    Nobody imports a name that begins with an underscore. Breaks if two files share a detail of one.
    """
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("zero3"):
                private = [a.name for a in node.names if a.name.strip("_") != a.name.rstrip("_")
                           and not a.name.startswith("__")]
                assert not private, f"{name} imports {private}"


def test_whoever_opens_the_package_sees_the_tutorial_first():
    """
    Few files, the tutorial in its order, and a folder for each later chapter. Breaks if a chapter
    puts its files beside the heart.
    """
    files = {path.stem for path in PACKAGE.glob("*.py")}
    assert files == {"__init__", "layer", "flat", "watch", "comm", "schedule", "sharded",
                     "offload"}
