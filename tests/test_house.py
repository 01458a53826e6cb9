"""
# The house: which file may know which

The order of files and folders is a claim of the package's map. Here it is a test.
"""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import torch
from torch import nn

from zero3 import Offload, Zero3Layer, Zero3Optimizer, wrap
from zero3.comm.order import Listener, Named, Sender
from zero3.comm.reducer import Reducible
from zero3.estimate.ledger import Ledger
from zero3.flat import GradientSink, Storage, StorageFactory
from zero3.guards.contents import ShardedLayer
from zero3.guards.freed import Owner
from zero3.schedule import Chain, Schedule
from zero3.whole_model.materialise import WholeModel

PACKAGE = Path(__file__).parents[1] / "zero3"
# From the ground up: a file imports only files of its own row or of rows above it.
ROWS = (
    {"guards", "in_flight", "watch", "minimal", "__init__"},
    {"gradients", "flat"},
    {"comm"},
    {"offload"},
    {"sharded"},
    {"schedule"},
    {"layer"},
    {"optimizer"},
    {"estimate"},
    {"whole_model", "pipeline", "inject", "compression"},
    {"compiler"},
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
    assert files == {"__init__", "minimal", "layer", "flat", "watch", "schedule", "sharded",
                     "gradients", "in_flight"}


def test_each_seam_is_filled_by_parts_of_its_type(tmp_path):
    """
    Whatever the heart and the later chapters hand in at a seam has all that the seam asks for.
    Breaks if a seam asks for more than one of its parts has.
    Proves `Storage`, `GradientSink`, `Schedule`, `Listener`, `Sender`, `Named`, `Reducible`,
    `Owner`, `ShardedLayer`, `WholeModel`, `Schedule.ahead`, `Schedule.stays_full`,
    `TracedOrder.ahead`, `ShardStates.grad_device`, `StorageFactory`.
    """
    files = Offload("nvme", folder=tmp_path)
    model = wrap(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear, offload=files)
    optimizer = Zero3Optimizer(model, offload=files)
    layer = Zero3Layer(nn.Linear(2, 2))
    unit = model.units[1]
    states = optimizer.shard_states[0]
    parts = {
        Storage: [layer.flats[0].storage, unit.flats[0].storage],
        StorageFactory: [layer.offload, unit.offload],
        GradientSink: [layer.flats[0], states],
        Schedule: [layer.schedule, Chain(), unit.schedule],
        Listener: [layer.listener, Ledger(model)],
        Sender: [layer, unit, optimizer],
        Named: [layer, unit, optimizer, model],
        Reducible: [layer, unit],
        Owner: [layer, unit],
        ShardedLayer: [layer, unit],
        WholeModel: [model],
    }
    for seam, filled_by in parts.items():
        asked = {*seam.__annotations__, *(name for name in vars(seam) if name[0] != "_")}
        for part in filled_by:
            lacks = [name for name in asked if not hasattr(part, name)]
            assert asked and not lacks, (seam.__name__, type(part).__name__, lacks)
    assert unit.schedule.ahead(unit) == []
    # A gradient on its way to a file arrives in CPU memory first.
    assert states.grad_device == torch.device("cpu")
