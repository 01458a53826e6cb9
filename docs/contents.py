"""
# The order of the book

One list says which pages there are and in which order they are read. The sidebar, the links at the
foot of each page, the index, the README's table of notebooks and the table of files in
`zero3/__init__.py` all come from it. The README's figures come from the recorded benchmark.

The *path* has seven chapters, each of a few pages that are read in order. Most chapters also have
pages for readers who want more: the other files of the same folder, and a notebook. Further
chapters follow. The appendix has everything that is looked up and not read: reference, exercises,
tests, and the source of the book itself.

| kind | for example | in the tables as |
|---|---|---|
| chapter of the path | `zero3/comm/collectives.py` | 6 |
| further chapter | `zero3/estimate/ledger.py` | more |
| appendix | `docs/names.md` | |

The minutes of a page are estimated from its length: a reader takes in 220 words of prose in a
minute, or 5 lines of code.

**Run this**: `python -m docs.contents` prints the list; with `--write` it also writes the tables.

**Not covered, and what that costs**: figures and tables of numbers take time, too, but are not
counted. So a page with many of them takes longer than it says.
"""

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
WORDS_PER_MINUTE = 220
LINES_PER_MINUTE = 5
HEAD = "| chapter | file | contents |\n|---|---|---|\n"
NOTEBOOKS = "| | notebook | question |\n|---|---|---|\n"
SPEED = ("| two ranks, two CPU cores | DDP | FSDP2 | `Zero3Sequential` | `wrap` | `minimal.py` |\n"
         "|---|---|---|---|---|---|\n")
GPU = SPEED.replace("two ranks, two CPU cores", "one rank, one NVIDIA H200")


@dataclass(frozen=True)
class Item:
    """
    ## A page

    * `path` is the file that it is made of, from the root of the repository
    * `about` says in a few words what is in it
    """

    path: str
    about: str = ""


@dataclass(frozen=True)
class Chapter:
    """
    ## A chapter: pages to read in order, and more pages

    * `name` is the short title in the sidebar, and `about` a phrase on the index
    * `items` are its pages, and the first `core` of them are on the path
    """

    name: str
    about: str
    items: tuple[Item, ...]
    core: int = 1

    @property
    def first(self) -> Item:
        return self.items[0]

    @property
    def path(self) -> tuple[Item, ...]:
        return self.items[: self.core]

    @property
    def more(self) -> tuple[Item, ...]:
        return self.items[self.core :]


def chapter(name: str, about: str, *items: tuple[str, str], core: int = 1) -> Chapter:
    return Chapter(name, about, tuple(Item(*item) for item in items), core)


PATH = (
    chapter(
        "The problem",
        "why every rank is full, and the three things that can be cut",
        ("docs/problem.md", "why one GPU is too small, and what can be cut"),
        ("docs/calculator.md", "the memory of any model on any number of ranks"),
        ("docs/ladder.md", "seven ways to train one model, measured"),
        ("notebooks/01_where_the_memory_goes.ipynb",
         "How many bytes does training need for each parameter?")),
    chapter(
        "One layer, with numbers",
        "three weights on two ranks, from initialisation to update",
        ("docs/life.md", "three weights on two ranks, from initialisation to update"),
        ("notebooks/03_one_layer.ipynb", "How does `Zero3Layer` work, step by step?")),
    chapter(
        "The idea in one file",
        "a chain that trains, in one file that needs torch and nothing else",
        ("zero3/minimal.py", "the idea, whole, in one file")),
    chapter(
        "The tape",
        "a whole training step, event by event",
        ("docs/tape.md", "a recorded training step, event by event"),
        ("notebooks/04_a_transformer.ipynb",
         "Do many layers overlap, and do the bytes add up?")),
    chapter(
        "The heart",
        "what the one file lacks: shard, unshard, forward, backward, reduce",
        ("zero3/layer.py", "the heart: `Zero3Layer` and `Zero3Sequential`"),
        ("zero3/flat.py",
         "the flat parameter: one buffer for all parameters of a layer"),
        ("zero3/watch.py", "when the backward pass of a layer begins and ends"),
        ("zero3/sharded.py",
         "full parameters, clipping, errors; which layer is gathered next"),
        ("zero3/gradients.py", "the norm of a sharded gradient, and clipping by it"),
        core=4),
    chapter(
        "Communication",
        "collectives, streams, and the same order on all ranks",
        ("zero3/comm/collectives.py",
         "collectives that overlap computation"),
        ("zero3/comm/reducer.py", "the reduce of a layer, while the next one goes backward"),
        ("zero3/comm/order.py", "all ranks alike, or an error on all of them"),
        ("zero3/comm/leaving.py", "the end of a program: gloo's threads end first"),
        ("notebooks/02_collectives.ipynb", "How much does each collective send?")),
    chapter(
        "The optimizer",
        "masters, loss scales, norms, and states in any tier",
        ("zero3/optimizer/stage3.py",
         "`Zero3Optimizer`: loss scale, clipping, the step"),
        ("docs/questions.md", "what you can explain now"),
        ("zero3/optimizer/buckets.py", "small layers share a reduce-scatter"),
        ("zero3/optimizer/states.py",
         "masters, moments and gradients of a shard, in one place or two"),
        ("zero3/optimizer/whole.py", "whole matrices for Muon: each has an owner"),
        ("zero3/optimizer/steps.py", "who hears of the steps of all optimizers"),
        ("notebooks/06_optimizer.ipynb", "Why masters, loss scales and norms?"),
        ("notebooks/14_whole_matrices.ipynb", "Who steps a matrix that two ranks share?"),
        core=2),
)

FURTHER = (
    chapter(
        "Offload",
        "shards in CPU memory and in files",
        ("zero3/offload/tiers.py", "`Offload`: shards in CPU memory, in files or encoded"),
        ("zero3/offload/in_file.py", "tensors in a file, read ahead"),
        ("zero3/offload/disk.py", "reads and writes past the page cache"),
        ("zero3/offload/activations.py", "activations that rest elsewhere"),
        ("zero3/offload/tensors.py", "safetensors files, written tensor by tensor"),
        ("notebooks/05_offload.ipynb", "How much do CPU memory and files save, and cost?")),
    chapter(
        "Whole models",
        "models that are no chain, and larger than memory",
        ("zero3/whole_model/units.py", "layers of a whole model, in a recorded order"),
        ("zero3/whole_model/wrap.py", "`wrap`: shard a whole model without changing it"),
        ("zero3/whole_model/materialise.py",
         "models larger than memory"),
        ("zero3/whole_model/__main__.py", "its command line"),
        ("notebooks/07_whole_models.ipynb", "How is a model prefetched that is no chain?")),
    chapter(
        "Checkpoints",
        "save on two ranks, load on three",
        ("zero3/checkpoint/save_load.py",
         "`save` and `load`, on any number of ranks"),
        ("zero3/checkpoint/reader.py", "a checkpoint on disk, complete or absent"),
        ("zero3/checkpoint/entries.py",
         "the contents of a checkpoint"),
        ("zero3/checkpoint/formats.py", "formats of other libraries"),
        ("zero3/checkpoint/convert.py", "converting between them"),
        ("zero3/checkpoint/__main__.py", "its command line"),
        ("notebooks/08_checkpoints.ipynb", "How does a run resume on other ranks?")),
    chapter(
        "Groups and links",
        "models on some of the ranks, replicas, nodes, and fewer bytes between them",
        ("zero3/comm/links.py",
         "`Links`: groups of ranks, and fewer bytes between nodes"),
        ("zero3/comm/encodings.py", "`Int8` and `Int4`: numbers in fewer bytes"),
        ("zero3/comm/parts.py", "which part of a weight a rank has"),
        ("notebooks/09_groups_of_ranks.ipynb", "How few bytes have to cross a slow link?")),
    chapter(
        "Measuring",
        "predict bytes, and record them",
        ("zero3/estimate/ledger.py",
         "`Ledger`: measured bytes"),
        ("zero3/estimate/predict.py", "`predict`: the same bytes, from shapes"),
        ("zero3/estimate/formulas.py", "the papers' formulas"),
        ("zero3/estimate/saved.py", "what autograd saves, and how much of it leaves"),
        ("zero3/estimate/between.py", "which layout sends the fewest bytes"),
        ("zero3/estimate/__main__.py", "its command line")),
    chapter(
        "Pipelines",
        "stages of a model that are sharded, too",
        ("zero3/pipeline/schedules.py", "a pipeline's step as a list of actions"),
        ("zero3/pipeline/timeline.py", "what a schedule costs, before it runs"),
        ("zero3/pipeline/stages.py",
         "stages: layers that stay whole for longer"),
        ("zero3/pipeline/channels.py",
         "activations and gradients between the stages"),
        ("zero3/pipeline/pipeline.py",
         "`Pipeline`: train a model in sharded stages"),
        ("zero3/pipeline/__init__.py", "its public name"),
        ("zero3/pipeline/__main__.py", "its command line"),
        ("notebooks/10_pipeline.ipynb", "How often does a stage have to be gathered?")),
    chapter(
        "Compiler",
        "a step as a graph, and passes that move its communication",
        ("zero3/compiler/graph.py", "a step as a list of operations"),
        ("zero3/compiler/passes.py", "passes: gather earlier, keep, share"),
        ("zero3/compiler/trace.py", "from a model to graphs, by `torch.compile`"),
        ("zero3/compiler/engines.py",
         "who computes between two communications"),
        ("zero3/compiler/away.py", "optimizer states that leave the device"),
        ("zero3/compiler/model.py", "`compile`: a sharded model that runs as graphs"),
        ("notebooks/11_compiler.ipynb", "How many gathers does a step really need?")),
    chapter(
        "Injection",
        "other forwards for a model's modules, and layers that several ranks compute",
        ("zero3/inject/replace.py", "`inject` and `restore`"),
        ("zero3/inject/policies.py", "policies: which modules, and which forwards"),
        ("zero3/inject/cross_entropy.py", "a loss that never has all logits"),
        ("zero3/inject/tensor.py", "tensor parallelism"),
        ("zero3/inject/line.py", "what the ranks of a split model exchange"),
        ("zero3/inject/sequence.py", "norms on some of the positions"),
        ("zero3/inject/__init__.py", "its public names"),
        ("notebooks/13_tensor_parallel.ipynb", "How few bytes let two ranks compute one layer?")),
    chapter(
        "Compression",
        "fewer bits and fewer elements, while the model trains",
        ("zero3/compression/rules.py", "rules: which compression, and when"),
        ("zero3/compression/weights.py", "compressed weights: masks and grids, freed after use"),
        ("zero3/compression/thresholds.py", "the k-th smallest number of all ranks"),
        ("zero3/compression/compress.py", "`compress`: rules that advance with the optimizer"),
        ("zero3/compression/distill.py", "`distill`: a student from a teacher's layers"),
        ("zero3/compression/clean.py", "`clean`: a model that really is smaller"),
        ("zero3/compression/stored.py", "weights that are stored in their bits"),
        ("zero3/compression/__init__.py", "its public names"),
        ("notebooks/12_compression.ipynb", "How small can a model be that still predicts well?")),
    chapter(
        "Guards",
        "errors for what cannot be right",
        ("zero3/guards/moments.py", "when the guards look"),
        ("zero3/guards/freed.py", "a freed parameter reports every use"),
        ("zero3/guards/placement.py", "the same parameters on every rank"),
        ("zero3/guards/contents.py", "a use of a layer that would go wrong later"),
        ("zero3/guards/shard_gradients.py", "no norm of a part of a gradient"),
        ("zero3/guards/room.py", "memory that is left"),
        ("zero3/guards/checks.py", "checks: of arguments, layers, and what ranks will send"),
        ("zero3/guards/command_line.py", "errors of command lines"),
        ("zero3/guards/__init__.py", "all guards in one place")),
    chapter(
        "Other loops",
        "accelerate, the Trainer, Fabric and torch's checkpoints, with a sharded model",
        ("docs/loop.md", "use it in your loop: six programs"),
        ("zero3/beside/accelerate.py", "accelerate: its calls, on a sharded model"),
        ("zero3/beside/trainer.py", "Trainer: Hugging Face's loop, on a sharded model"),
        ("zero3/beside/fabric.py", "Lightning Fabric: a strategy, for a sharded model"),
        ("zero3/beside/pairs.py", "pairs: the optimizer that steps a sharded model"),
        ("zero3/beside/dcp.py", "DCP: torch's checkpoints, from shards")),
    chapter(
        "A training job",
        "the main job and its parts",
        ("zero3/train/job.py", "the main job, `make train`"),
        ("zero3/train/gpt.py", "a byte-level GPT, as a list of layers"),
        ("zero3/train/compressed.py", "the same job, compressed while it trains"),
        ("zero3/train/report.py", "its table and pictures"),
        ("zero3/train/launch.py", "ranks, started from Python or by torchrun"),
        ("zero3/train/__main__.py", "its command line")),
)


@cache
def page_of(path: str) -> str:
    """
    ## The page of a file
    """
    folder = Path(path).parent.name
    name = Path(path).stem.replace("__init__", "map").replace("__main__", "command")
    alone = not path.endswith(".py") or folder == "zero3" or name.startswith("test_")
    return f"{name}.html" if alone else f"{folder}-{name}.html"


def found(pattern: str) -> tuple[Item, ...]:
    """
    ## The files of the repository that match a pattern and are not empty
    """
    return tuple(Item(str(path.relative_to(ROOT))) for path in sorted(ROOT.glob(pattern))
                 if path.stat().st_size)


REFERENCE = chapter(
    "Reference",
    "whatever is looked up",
    ("zero3/__init__.py", "the files of the package"),
    ("README.md", "what it is, and a first program"),
    ("docs/using.md", "complete programs to start from"),
    ("docs/running.md", "the main job: its output, stops and restarts"),
    ("docs/clusters.md", "several machines: torchrun, Slurm, Kubernetes"),
    ("docs/working.md", "tests, checks and benchmarks"),
    ("docs/invariants.md", "ten guarantees, and the tests of each"),
    ("docs/notation.md", "symbols and words"),
    ("docs/names.md", "our names, and those of other libraries"),
    ("docs/elsewhere.md", "how FSDP2 and DeepSpeed do it"))
PRACTICE = chapter(
    "Practice",
    "write it yourself",
    ("docs/exercises.md", "write the central functions yourself"),
    ("docs/mutations.md", "remove a line, and guess what breaks"))


def appendix() -> tuple[Chapter, ...]:
    """
    ## The chapters of the appendix
    """
    tests = found("tests/**/*.py")
    exercises = found("docs/exercises/ex*.py")
    tools = (*found("docs/**/*.py"), *found("notebooks/*.py"))
    own = [item for item in tools
           if item not in exercises and not re.search(r"notebooks/(\d|worker_)", item.path)]
    practice = dataclasses.replace(PRACTICE, items=(*PRACTICE.items, *exercises))
    return (REFERENCE, practice,
            Chapter("Tests", "each claim, as a program", tests),
            Chapter("How the book is made", "the source of these pages", tuple(own)))


def sources() -> list[str]:
    """
    ## The files of the package, in reading order
    """
    items = [item for each in (*PATH, *FURTHER, REFERENCE) for item in each.items]
    return [item.path for item in items if item.path.startswith("zero3/")]


def minutes(words: int, lines: int) -> int:
    """
    ## How long a page takes to read, at least a minute
    """
    return max(1, round(words / WORDS_PER_MINUTE + lines / LINES_PER_MINUTE))


# --------------------------------------------------------------------------------------- the tables


def rows() -> Iterator[str]:
    """
    ## The rows of the table of files
    """
    numbered = [(str(number), each) for number, each in enumerate(PATH, 1)]
    for number, each in (*numbered, *(("more", each) for each in FURTHER)):
        for item in each.items:
            if item.path.startswith("zero3/") and not item.path.endswith("__main__.py"):
                yield f"| {number} | `{item.path.removeprefix('zero3/')}` | {item.about} |"


def speed_rows() -> Iterator[str]:
    """
    ## The rows of the table of measured figures, from the recorded benchmark
    """
    medians = json.loads((ROOT / "docs/bench.json").read_text())["medians"]
    peers = ("ddp", "fsdp2", "zero3", "wrap", "minimal")
    for about, key, unit, decimals in (
            ("tokens in a second, in all", "tokens_per_s", 1, 0),
            ("MiB of a rank at the highest moment", "peak_bytes", 2**20, 0),
            ("MiB of a rank between two steps", "rest_bytes", 2**20, 0),
            ("MiB that a rank sends in a step", "wire_bytes", 2**20, 1)):
        figures = " | ".join(f"{medians[peer][key] / unit:,.{decimals}f}" for peer in peers)
        yield f"| {about} | {figures} |"


def gpu_rows() -> Iterator[str]:
    """
    ## The rows of the table of figures from a GPU
    """
    told = json.loads((ROOT / "docs/gpu.json").read_text())
    about = {size: f"{told[size]['numel'] / 1e6:.0f} million parameters"
             for size in ("small", "large")}
    for size, words in about.items():
        tokens = " | ".join(f"{median(each):,.0f}" for each in told[size]["tokens_per_s"].values())
        yield f"| tokens in a second, {words} | {tokens} |"
    peaks = " | ".join(f"{each / 2**20:,.0f}" for each in told["small"]["peak_bytes"].values())
    yield f"| MiB at the highest moment, {about['small']} | {peaks} |"


def notebook_rows() -> Iterator[str]:
    """
    ## The rows of the table of notebooks, in the order of their numbers
    """
    items = [item for each in (*PATH, *FURTHER) for item in each.items
             if item.path.endswith(".ipynb")]
    for item in sorted(items, key=lambda each: each.path):
        number, _, name = Path(item.path).stem.partition("_")
        yield f"| {int(number)} | [{name.replace('_', ' ')}]({item.path}) | {item.about} |"


# The tables of each file, by their heads, and what writes their rows.
TABLES: dict[str, dict[str, Callable[[], Iterator[str]]]] = {
    "README.md": {SPEED: speed_rows, NOTEBOOKS: notebook_rows},
    "docs/working.md": {GPU: gpu_rows},
    "zero3/__init__.py": {HEAD: rows},
}


def with_tables(path: str) -> str:
    """
    ## The text of a file, with its tables as they have to be

    Raises `ValueError` if the file has no table with the right head.
    """
    text = (ROOT / path).read_text()
    for head, lines in TABLES[path].items():
        before, found_head, rest = text.partition(head)
        if not found_head:
            raise ValueError(f"{path} lacks a table. Expected: a table that begins with "
                             f"{head!r}. What to do: put its head there, and run `python -m "
                             "docs.contents --write`.")
        text = before + head + "\n".join(lines()) + "\n" + re.sub(r"\A(\|.*\n)*", "", rest)
    return text


def main(argv: list[str] | None = None) -> int:
    """
    ## Print the list, or write the tables
    """
    parser = argparse.ArgumentParser(prog="docs.contents", description="The order of the book.")
    parser.add_argument("--write", action="store_true", help="write the tables into the files")
    args = parser.parse_args(argv)
    for path in TABLES:
        if args.write:
            (ROOT / path).write_text(with_tables(path))
    for number, each in enumerate((*PATH, *FURTHER, *appendix()), 1):
        print(f"{number:2} {each.name}")
        for item in each.items:
            print(f"     {item.path:44} {item.about}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
