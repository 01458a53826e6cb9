"""
# The house: which file may know which

The order of files and folders is a claim of the package's map. Here it is a test.
"""

import ast
import functools
import io
import os
import subprocess
import sys
import tokenize
from graphlib import TopologicalSorter
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from tests.ranks import run
from zero3 import Offload, Zero3Layer, Zero3Optimizer, Zero3Sequential, wrap
from zero3.comm.collectives import _ORDER_TAG
from zero3.comm.order import Listener, Sender
from zero3.comm.reducer import Reducible
from zero3.compiler.model import CompiledUnit
from zero3.estimate.ledger import Ledger
from zero3.flat import GradientSink, Storage, StorageFactory
from zero3.guards import moments
from zero3.guards.checks import Announced, Guarded, Named
from zero3.sharded import Schedule
from zero3.whole_model.units import Unit

PACKAGE = Path(__file__).parents[1] / "zero3"
# From the ground up: a file imports only files of its own row or of rows above it.
ROWS = (
    {"guards", "minimal", "__init__"},
    {"gradients", "flat", "watch"},
    {"comm"},
    {"offload"},
    {"sharded"},
    {"layer"},
    {"optimizer"},
    {"estimate"},
    {"whole_model", "pipeline", "inject", "compression"},
    {"compiler"},
    {"checkpoint"},
    {"train", "beside"},
)
# What a folder may have, in statements. A chapter that grows beyond it raises its number here.
MOST = {"": 920, "beside": 407, "checkpoint": 1180, "comm": 936, "compiler": 809,
        "compression": 715, "estimate": 544, "guards": 552, "inject": 667, "offload": 766,
        "optimizer": 1034, "pipeline": 685, "train": 832, "whole_model": 753}
# What the heart reaches by its imports, in lines of code.
MOST_REACHED = 1500
MOST_ANY = 268
# What makes a tensor where the default device is.
FACTORIES = {f"torch.{name}" for name in (
    "arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "ones",
    "rand", "randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros")}
# The map imports by name what somebody asks for.
LAZY = {"__init__"}


@functools.cache
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
                places = [full, f"{full}.__init__", inside or "__init__"]
                yield next((place for place in places if place in known), places[-1])
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "zero3":
                    yield alias.name.removeprefix("zero3").lstrip(".") or "__init__"


def statements(tree):
    """How many statements there are, without docstrings"""
    texts = [node.body[0] for node in ast.walk(tree)
             if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
             and ast.get_docstring(node, clean=False) is not None]
    return sum(isinstance(node, ast.stmt) for node in ast.walk(tree)) - len(texts)


def code_lines(name):
    """How many lines of a file are code, and neither comment nor docstring"""
    text = PACKAGE.joinpath(*name.split(".")).with_suffix(".py").read_text(encoding="utf-8")
    prose = set()
    for node in ast.walk(ast.parse(text)):
        is_told = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        if is_told and ast.get_docstring(node):
            prose |= {*range(node.body[0].lineno, node.body[0].end_lineno + 1)}
    blank = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
             tokenize.ENDMARKER}
    code = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in blank and token.start[0] not in prose:
            code |= {*range(token.start[0], token.end[0] + 1)}
    return len(code)


def test_the_heart_reaches_its_parts_and_no_chapter():
    """
    `layer.py`, and all that it imports when it is imported, are files beside it, of `comm`, and
    the seam of the guards. Breaks if the heart imports a chapter or a guard, or if its parts grow.
    """
    known = modules()
    reached = set()
    todo = ["layer"]
    while todo:
        name = todo.pop()
        if name in reached or name in LAZY:
            continue
        reached.add(name)
        # Not the imports inside functions, by which an argument brings its chapter.
        todo += imported(ast.Module([node for node in known[name].body
                                     if isinstance(node, (ast.Import, ast.ImportFrom))], []), known)
    assert {name.rpartition(".")[0] for name in reached} == {"", "comm", "guards"}
    assert not reached & {"comm.links", "comm.encodings", "comm.parts"}
    assert {name for name in reached if "guards" in name} == {
        "guards.moments", "guards.checks"}
    assert sum(map(code_lines, reached)) <= MOST_REACHED


def test_no_folder_grows_unnoticed():
    """
    A chapter is as long as it has to be. Breaks if one gets longer than it was, and nobody has said
    so in `MOST`.
    """
    found = dict.fromkeys(MOST, 0)
    for name, tree in modules().items():
        found[name.rpartition(".")[0]] += statements(tree)
    assert all(found[folder] <= most for folder, most in MOST.items()), found


def test_few_values_are_of_any_type():
    """
    Those of users, trees of tensors, and what torch itself does not type. Breaks if a value of ours
    has no type.
    """
    found = sum(isinstance(node, ast.Name) and node.id == "Any"
                for tree in modules().values() for node in ast.walk(tree))
    assert found <= MOST_ANY


def without_device(name, node):
    """Where a file makes a tensor without saying on which device, examples aside"""
    if name == "minimal" or getattr(node, "name", None) == "main":
        return
    if isinstance(node, ast.Attribute) and ast.unparse(node) in FACTORIES:
        yield f"{name}, line {node.lineno}: {ast.unparse(node)}"
    says = isinstance(node, ast.Call) and any(
        each.arg in ("device", None) for each in node.keywords)
    for child in ast.iter_child_nodes(node):
        if not (says and isinstance(child, ast.Attribute)):
            yield from without_device(name, child)


def test_each_new_tensor_says_on_which_device_it_is():
    """
    Users may choose a default device, and the buffer of a file would be on their GPU.
    """
    assert not [place for name, tree in modules().items() for place in without_device(name, tree)]


def ways():
    """The functions from a layer to torch's collective, of a gather and of a reduce"""
    model = Zero3Sequential([Zero3Layer(nn.Linear(2, 2)) for _ in range(2)])
    real = dist.isend
    found = set()

    def isend(*args, **kwargs):
        frame = sys._getframe(1)
        names = []
        while frame and frame.f_code.co_name not in ("fetch_params", "_backup_grads"):
            names.append(frame.f_code.co_name)
            frame = frame.f_back
        if kwargs["tag"] != _ORDER_TAG:
            found.add((frame.f_code.co_name, *reversed(names)))
        return real(*args, **kwargs)

    dist.isend = isend
    model(torch.ones(2, 2)).sum().backward()
    dist.isend = real
    return found


def test_two_steps_lead_from_a_layer_to_the_collective():
    """
    A reader who follows a gather or a reduce opens two functions. Breaks if a third one comes in
    between.
    Proves `Zero3Layer.fetch_params`, `Zero3Layer._backup_grads`, `Communicator.send`.
    """
    for found in run(ways, 2):
        assert found == {("fetch_params", "all_gather", "send"),
                         ("_backup_grads", "reduce_scatter", "send")}


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


def test_nothing_imports_what_is_beside_other_libraries():
    """
    The package works where these libraries are not installed. Breaks if any other file imports one
    of `zero3/beside`, or one of the libraries.
    """
    known = modules()
    for name, tree in known.items():
        if name.startswith("beside."):
            continue
        assert not [other for other in imported(tree, known) if other.startswith("beside")]
        for node in ast.walk(tree):
            found = [node.module or ""] if isinstance(node, ast.ImportFrom) else [
                alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not {each.split(".")[0] for each in found} & {
                "accelerate", "transformers", "peft"}, name


def test_whoever_opens_the_package_sees_the_tutorial_first():
    """
    Few files, the tutorial in its order, and a folder for each later chapter. Breaks if a chapter
    puts its files beside the heart.
    """
    files = {path.stem for path in PACKAGE.glob("*.py")}
    assert files == {"__init__", "minimal", "layer", "flat", "watch", "sharded",
                     "gradients"}


def asked_alone():
    """Whether `zero3.layer`, imported alone in a new process, refuses a write in forward"""
    code = ("import torch\nfrom zero3.layer import Zero3Layer\n"
            "class Writes(torch.nn.Linear):\n"
            "    def forward(self, x):\n"
            "        self.weight.detach().zero_()\n"
            "        return super().forward(x)\n"
            "try:\n    Zero3Layer(Writes(2, 2))(torch.ones(1, 2))\n"
            "except RuntimeError as error:\n    print(error)\n")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)})
    return done.stdout, done.stderr


def test_the_heart_alone_asks_all_guards():
    """
    Whoever imports `zero3.layer` and nothing else gets the guards with it, because Python imports
    the package first. Breaks if the heart runs unchecked, or if a guard is handed in later.
    Proves `check_module`, `check_params`, `check_step`, `FreedParameter.named`, `check_chain`,
    `check_walk`, `diverged`, `mark`, `uncompiled`, `LayerGuard`, `LayerGuard.__exit__`.
    """
    assert vars(moments)["guards"] is sys.modules["zero3.guards"]
    said, error = asked_alone()
    assert "has written to `weight`" in said and not error


def test_each_seam_is_filled_by_parts_of_its_type(tmp_path):
    """
    Whatever the heart and the later chapters hand in at a seam has all that the seam asks for.
    Breaks if a seam asks for more than one of its parts has.
    Proves `Storage`, `GradientSink`, `Schedule`, `Listener`, `Sender`, `Named`, `Reducible`,
    `Guarded`, `Announced`, `Schedule.ahead`, `Schedule.stays_full`,
    `ShardStates.__init__`, `StorageFactory`.
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
        Schedule: [layer.schedule, unit.schedule],
        Listener: [layer.listener, Ledger(model)],
        Sender: [layer, unit, optimizer],
        Named: [layer, unit, optimizer, model],
        Reducible: [layer, unit],
        Guarded: [layer, unit],
        Announced: [layer.comm.all_gather(layer, [])],
    }
    for seam, filled_by in parts.items():
        asked = {*seam.__annotations__, *(name for name in vars(seam) if name[0] != "_")}
        for part in filled_by:
            lacks = [name for name in asked if not hasattr(part, name)]
            assert asked and not lacks, (seam.__name__, type(part).__name__, lacks)
    assert unit.schedule.ahead(unit) == []
    # A gradient on its way to a file arrives in CPU memory first.
    assert states.grad_device == torch.device("cpu")


def test_few_methods_of_the_heart_are_replaced():
    """
    A later chapter fills a seam, and replaces a method of `Zero3Layer` only where there is none.
    Breaks if a chapter replaces another one: look for a seam first.
    Proves `Zero3Layer`, `Unit`, `CompiledUnit`.
    """
    heart = {name for name in vars(Zero3Layer) if name.strip("_") and name[:2] != "__"}
    replaced = {kind.__name__: heart & {*vars(kind)} for kind in (Unit, CompiledUnit)}
    assert replaced == {
        "Unit": {"_release", "forward", "_pre_backward_hook", "is_over", "_backup_grads", "settle"},
        "CompiledUnit": {"forward", "reduce", "_settle_at_end_of_backward", "settle"}}
    layers = {node.name for path in PACKAGE.rglob("*.py")
              for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
              if isinstance(node, ast.ClassDef) and {"Zero3Layer", "Unit", "CompiledUnit"} & {
                  base.id for base in node.bases if isinstance(base, ast.Name)}}
    assert layers == replaced.keys()
