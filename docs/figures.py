"""
# Figures from real runs

During the build `Figures` records the tape, runs the ladder, and reads the recorded timings. `fill`
inserts them where a page contains `{{name}}`.

A typed number becomes wrong when the code changes. Everything that can be counted is therefore
counted again in each build, which takes seconds. Timings cannot be repeated in each build, because
they need a machine that does nothing else. So the benchmark stores a digest of each source file,
not counting comments, together with its timings. The build rejects timings of code that has changed
since.

**Run this**: `make docs`; `make bench ARGS="--out docs/bench.json"` times anew.

**Not covered, and what that costs**: timings are not rejected if a library has changed, such as
torch. Its version is in the caption.
"""

import ast
import json
import re
import statistics
from collections.abc import Callable
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import DiffLexer, PythonLexer

from docs import (
    boxes,
    bucketing,
    calculator,
    compiled,
    ladder,
    lanes,
    layouts,
    orderings,
    ranks,
    rungs,
    tape,
    timelines,
)
from docs import example as life
from docs.annotate import Source, slug
from docs.contents import FURTHER, PATH
from docs.exercises.solutions import EXERCISES, page
from docs.mutations import all_with_lines
from docs.svg import BAR, PHONE, WIDE, Drawing, figure, origin
from docs.trial import Mutation
from zero3.estimate.formulas import places, stages
from zero3.train import compressed, launch

HERE = Path(__file__).parent
# A number with one of these units was measured.
MEASURED = re.compile(r"\d[\d.,]*\s?(?:[kKMGT]i?B|bytes|[mµu]?s|seconds|minutes|hours|tok\w*|"
                      r"times (?:as|faster)|x|×|%)(?!\w)")


# Where figures stand in the chapters: the file, the section, words of the block that a figure
# follows (if there are none, the first), and the figure.
PLACED: tuple[tuple[str, str, str, str], ...] = (
    ("flat.py", "", "<strong>Two parameters on two ranks.", "example.flat"),
    ("comm/collectives.py", "", "The norm of the whole gradient", "example.comm"),
    ("layer.py", "Zero3Sequential.walk", "", "figure.prefetch"),
    ("layer.py", "Zero3Layer._pre_backward_hook", "", "figure.backward"),
    ("comm/collectives.py", "", "The third row says", "figure.streams"),
    ("optimizer/buckets.py", "", "The bytes on the wire", "figure.bucket"),
    ("optimizer/stage3.py", "Zero3Optimizer.step", "", "example.optimizer"),
    ("offload/tiers.py", "", "copy, then all-gather", "example.offload"),
    ("offload/tiers.py", "", "and which tier a model needs", "figure.files"),
    ("checkpoint/save_load.py", "", "on four ranks", "example.checkpoint"),
    ("optimizer/states.py", "", "<strong>States in files.", "figure.files"),
    ("checkpoint/save_load.py", "", "<strong>On another number of ranks", "figure.reshard"),
    ("whole_model/units.py", "", "A pass that goes another way", "figure.trace"),
    ("pipeline/schedules.py", "", "<th>slot</th>", "figure.1f1b"),
    ("pipeline/schedules.py", "", "go forward through a stage before the next", "figure.breadth"),
    ("pipeline/schedules.py", "", "enough, and one for the last", "lanes.compared"),
    ("inject/policies.py", "", "<strong>Run this", "bench.inject"),
    ("inject/tensor.py", "", "<strong>Run this", "bench.tensor"),
    ("inject/tensor.py", "", "all-reduce</td>", "ranks.tensor"),
    ("comm/links.py", "", "<em>gather across</em>", "ranks.links"),
    ("comm/links.py", "groups_of", "reduce-scatter</td>", "ranks.mesh"),
    ("compression/thresholds.py", "", "second digits", "ranks.thresholds"),
    ("compiler/model.py", "", "<strong>What it gains", "bench.compile"),
    *(("compiler/passes.py", name, "", f"pass.{name}") for name in compiled.CAPTIONS),
    ("optimizer/whole.py", "", "<strong>Run this", "figure.muon"),
    ("train/compressed.py", "", "is the yardstick", "figure.compressed"),
)
# What is timed, in words.
PEERS = {"zero3": "zero3, a chain", "wrap": "zero3, wrap", "minimal": "zero3, the one file",
         "fsdp2": "FSDP2", "ddp": "DDP, not sharded"}
# The models that are compiled, and the ways to train them, in words.
MODELS = {"gpt": "GPT", "small-layers": "100 small layers"}
WAYS = {
    "compile": "compile",
    "compile-eager": 'compile, backend="aot_eager"',
    "compile-units": 'compile, backend="aot_eager", unit_bytes=1 << 20',
    "wrap": "wrap",
    "wrap-units": "wrap, unit_bytes=1 << 20",
    "fsdp2-compile": "FSDP2, torch.compile for each block",
    "ddp": "DDP",
}


class Figures:
    """
    ## All measured figures, by name
    """

    def __init__(self) -> None:
        """
        ### Record the tape and run the ladder
        """
        self.problems: list[str] = []
        # What all ranks import, before the first of them starts.
        launch.preload("docs.tape", "docs.ladder", "docs.layouts", "docs.example",
                       "docs.timelines", "docs.lanes")
        self.tapes = tape.recordings()
        self.tape = self.tapes["2-prefetch"]
        self.ladder = ladder.climb()
        self.layouts = layouts.record()
        self.life = life.record()
        self.timelines = timelines.record()
        self.lanes = lanes.record()
        self.compiled = compiled.record()
        self.mutations = {(m.file, last): (m, first) for m, first, last in all_with_lines()}
        # Files to write beside the pages.
        self.files = tape.data_files(self.tapes) | {
            "trace.json": json.dumps(tape.chrome_trace(self.tape))}
        self.values: dict[str, Callable[[], str] | str] = {
            "staircase": figure(
                tape.staircase(self.tape), tape.staircase(self.tape, 360),
                "Memory of one rank during a training step of a small GPT, from a recorded run: "
                f"{origin(self.tape, self.tape['world_size'])}. Each step up allocates memory: "
                "for a gathered layer, for its gradient, or to receive gradients. Each step down "
                "frees it."),
            "tape.caption": origin(self.tape, self.tape["world_size"]),
            "tape.compared": rungs.html_table(tape.compared(self.tapes), words=2),
            "ladder.caption": origin(self.ladder, self.ladder["ranks"]),
            "calculator.table": calculator.table,
            "figure.prefetch": lambda: timelines.prefetch(self.timelines),
            "figure.backward": lambda: timelines.backward(self.timelines),
            "figure.bucket": lambda: bucketing.bucket(self.timelines),
            "figure.streams": lambda: orderings.streams(self.timelines),
            "figure.files": lambda: layouts.files(self.layouts),
            "figure.reshard": lambda: layouts.reshard(self.layouts),
            "figure.trace": lambda: layouts.trace(self.layouts),
            "figure.1f1b": lambda: lanes.figure(self.lanes, "1f1b"),
            "figure.breadth": lambda: lanes.figure(self.lanes, "breadth-first"),
            "figure.compressed": compressed_table, "figure.muon": muon_table,
            "ranks.links": ranks.links, "ranks.mesh": ranks.mesh, "ranks.tensor": ranks.tensor,
            "ranks.thresholds": ranks.thresholds,
            **{f"pass.{name}": partial(compiled.figure, self.compiled, name)
               for name in compiled.CAPTIONS},
            "lanes.compared": rungs.html_table(lanes.compared(self.lanes), words=1),
            "mutations": self.all_mutations, "exercises": self.exercises,
            "bench.sentence": self.speed, "bench.memory": self.memory,
            "bench.inject": self.injected, "bench.tensor": self.split,
            "bench.compile": self.compiled_steps,
            "minimal.lines": str(code_lines([HERE.parent / "zero3/minimal.py"])),
            "heart.lines": str(code_lines([HERE.parent / "zero3/layer.py"])),
            "core.lines": f"{code_lines(core_files()):,}",
            "fsdp2.lines": f"{code_lines(fsdp2_files()):,}",
        }
        self.values |= {f"ladder.{name}": value for name, value in self.rungs().items()}
        self.values |= {f"example.{name}": text for name, text in example().items()}
        overlap = json.loads((HERE / "gpu.json").read_text())["overlap"]
        self.values |= {f"gpu.{way}": f"{100 * ms['under_kernels'] / ms['copies']:.0f} %"
                        for way, ms in overlap["ms"].items()}
        self.values |= {f"example.{name}": partial(boxes.strip, self.life, name)
                        for name in boxes.STRIPS}
        # The positions of events that the page of the tape links to: those of activations are
        # from another recording.
        for key in ("2-prefetch-leave", "2-prefetch"):
            rank = self.tapes[key]["ranks"][0]
            self.values |= {f"tape.{name}": str(at) for name, at in
                            tape.moments(rank["events"], rank["frames"]).items() if at}
        # Bytes that a step reads from and writes to a tier, for one parameter on one rank.
        for place in places(1, 1):
            self.values |= {f"moves.{tier}.{place.params_in}.{place.states_in}": f"{moved:.0f}"
                            for tier, moved in place.step_bytes.items()}

    def place(self, file: str, section: str, html: str) -> str:
        """
        ### Put the figures of a section behind the paragraph or the table that they illustrate
        """
        for where, name, words, drawn in PLACED:
            if (where, name) != (file, section):
                continue
            at = html.find(words) if words else 0
            end = re.compile(r"</p>|</table>").search(html, at)
            if at < 0 or end is None:
                self.problems.append(f"{file}: `{name}` has no place for the figure {drawn}")
                continue
            html = html[: end.end()] + self.value(drawn, file) + html[end.end() :]
        return html

    def value(self, name: str, where: str, more: dict[str, str] | None = None) -> str:
        """
        ### A figure, by its name

        * `where` is the page that shows it, for the list of problems
        * `more` are figures that only this page has
        """
        known = (more or {}).get(name, self.values.get(name))
        if known is None:
            self.problems.append(f"{where}: there is no figure `{name}`")
        return str(known() if callable(known) else known)

    def fill(self, name: str, text: str, more: dict[str, str]) -> str:
        """
        ### Fill the placeholders of a page's markdown with figures

        * `more` are figures that the other pages lack, the tests of an invariant for instance
        """
        typed = MEASURED.search(re.sub(r"```.*?```|`[^`]*`|\$[^$]*\$", "", text, flags=re.DOTALL))
        if typed:
            self.problems.append(f"{name}: `{typed[0]}` is typed, and not filled in")

        return re.sub(r"\{\{([\w.]+)\}\}", lambda found: self.value(found[1], name, more), text)

    def write(self, out: Path) -> None:
        """
        ### Write the data files of the pages' scripts
        """
        for name, text in self.files.items():
            (out / name).write_text(text)

    def dock(self, file: str) -> str:
        """
        ### The scripts of the tape beside a chapter's source, or nothing if no event comes from it

        * `file` is its path in the package
        """
        files = {name for e in self.tape["ranks"][0]["events"] for name, *_ in e["lines"]}
        scripts = ("tape.js", "tape-2-prefetch.js", "tape-dock.js") if file in files else ()
        return "".join(f'<script src="{name}"></script>' for name in scripts)

    # ------------------------------------------------------------------------------------- ladder

    def rungs(self) -> dict[str, str]:
        """
        ### The figures and tables of the ladder, by name
        """
        run = self.ladder
        return {"figures": rungs.rung_figures(run, origin(run, run["ranks"])),
                "large": rungs.large_figure(run),
                "memory": rungs.memory_table(run), "traffic": rungs.traffic_table(run),
                "losses": rungs.losses_table(run), "differences": rungs.differences_table(run),
                "buffers": rungs.buffers(run), "compiled": rungs.compiled_table(run),
                "spared": rungs.fewer_compiled(run), "nodes": rungs.nodes_table(run),
                "fewer": rungs.fewer_between(run)}

    # ------------------------------------------------------------------------- mutations, exercises

    def beside(self, file: str, lines: list[int]) -> str:
        """
        ### The mutations of these lines, to be shown beside them
        """
        return "".join(
            f'<details class="mutation"><summary>If line'
            f'{f" {first}" if first == last else f"s {first} to {last}"} were wrong</summary>'
            f'<p><a href="mutations.html#{slug(m.title)}">{m.title}</a>:</p>{changed(m)}'
            f"<p>A small program then prints</p>{printed(m)}</details>"
            for (name, last), (m, first) in self.mutations.items()
            if name == file and last in lines)

    def all_mutations(self) -> str:
        """
        ### Each mutation: the change, and its folded effect
        """
        return "\n".join(
            f"## {m.title}\n\n[`{m.section}`](../zero3/{file}#L{first}), line {first}"
            + f" to {last}" * (last > first) + f"\n\n{changed(m)}\n\n"
            f"<details><summary>What happens</summary>\n\n{printed(m)}\n\n{m.why}"
            + f" It breaks {m.breaks}." * bool(m.breaks) + "\n\n</details>\n"
            for (file, last), (m, first) in self.mutations.items())

    def exercises(self) -> str:
        """
        ### Each exercise: the task, the stub, and the folded solution
        """
        parts = []
        for number in EXERCISES:
            p = page(number)
            task = re.sub(r"\]\((?=\w+\.py)", "](exercises/", p.task)
            places = re.sub(r"(`\S+`) \((\S+):(\d+)\)", r"[\1](../\2#L\3)", ", ".join(p.source))
            parts.append(
                f"## {p.title}\n\n{task}\n\nFill in [the file](exercises/{EXERCISES[number].name}"
                f".py), then `make exercise N={number}`.\n\n<pre>{colored(p.stub)}</pre>\n\n"
                f"<details><summary>Solution</summary>\n\n<pre>{colored(p.solution)}</pre>\n\n"
                f"In the source: {places}.\n\n</details>\n")
        return "\n".join(parts)

    # -------------------------------------------------------------------------------------- timings

    def speed(self) -> str:
        """
        ### The measured speed

        It is a problem if the code has changed since it was timed.
        """
        told = self.timed("bench.json", 'make bench ARGS="--out docs/bench.json"')
        machine = told["machine"]
        fsdp2 = ratio(told, "fsdp2", "tokens_per_s")
        ddp = ratio(told, "ddp", "tokens_per_s")
        return (f"Per second, it trains {fsdp2} times as many tokens as FSDP2, and {ddp} times as "
                "many as `DistributedDataParallel`, which shards nothing "
                f"({told['settings']['ranks']} ranks, {machine['gpu'] or machine['cpu']}, torch "
                f"{machine['torch']}, commit {machine['commit']}; median, minimum and "
                f"maximum of {told['settings']['rounds']} rounds)." + speed_chart(told))

    def timed(self, name: str, again: str) -> dict[str, Any]:
        """
        ### The results of a benchmark, from their file

        * `again` is the command that times them again, if code has changed since
        """
        told = json.loads((HERE / name).read_text())
        changed = [path for path, digest in told["code"].items()
                   if Source(HERE.parent / path).digest() != digest]
        if changed:
            self.problems.append(f"{name}: {', '.join(changed)} changed since it was timed; "
                                 f"`{again}`")
        return told

    def injected(self) -> str:
        """
        ### What each policy saves, as a table
        """
        told = self.timed("inject.json", "python -m tests.bench.inject --out docs/inject.json")
        rows = [["policy or model", "ms", "injected", "ratio of times", "kept MB", "injected",
                 "peak MB", "injected", "tokens/s", "injected"]]
        for name, row in told["rows"].items():
            speeds = [f"{each:,.0f}" for each in row.get("tokens_per_s", ())] or ["", ""]
            rows.append([name, *(f"{ms:.1f}" for ms in row["ms"]), middle(row["ratio"]),
                         *(f"{nbytes / 1e6:.1f}" for what in ("kept_bytes", "peak_bytes")
                           for nbytes in row[what]), *speeds])
        return rungs.html_table(rows) + timed_on(told, f"{told['settings']['rounds']} runs by "
                                                 "turns, on one core")

    def split(self) -> str:
        """
        ### A step of a split Llama beside torch's own, as a table
        """
        told = self.timed("tensor.json", "python -m tests.bench.tensor --out docs/tensor.json")
        rows = [["split by", "ms", "ratio to torch", "tokens/s", "peak MB"]]
        rows += [[name, f"{row['ms']:.0f}", middle(row["ratio"]), f"{row['tokens_per_s']:,.0f}",
                  f"{row['peak_bytes'] / 1e6:.1f}"] for name, row in told["rows"].items()]
        return rungs.html_table(rows) + timed_on(told, f"{told['settings']['steps']} steps by "
                                                 "turns, on two ranks")

    def compiled_steps(self) -> str:
        """
        ### A step of a compiled model beside the others, as a table
        """
        told = self.timed("compile.json", 'make bench ARGS="--compile --peers compile '
                          'fsdp2-compile compile-eager compile-units wrap wrap-units ddp --out '
                          'docs/compile.json"')
        rows = [["model", "trained by", "times DDP's step", "peak MB", "sent MB"]]
        for case, found in told["cases"].items():
            for peer, row in found["medians"].items():
                ratios = sorted(step_time(each[peer]) / step_time(each["ddp"])
                                for each in found["rounds"])
                times = middle([statistics.median(ratios), ratios[0], ratios[-1]])
                megabytes = [f"{row[what] / 1e6:.1f}" if what in row else ""
                             for what in ("peak_bytes", "wire_bytes")]
                rows.append([MODELS[case], WAYS[peer], times, *megabytes])
        return rungs.html_table(rows, words=2) + timed_on(
            told, f"{told['settings']['rounds']} rounds on two ranks", "the range")

    def memory(self) -> str:
        """
        ### The measured memory and communication
        """
        told = json.loads((HERE / "bench.json").read_text())
        peak = ratio(told, "fsdp2", "peak_bytes")
        sent = ratio(told, "fsdp2", "wire_bytes")
        return (f"In the same runs a rank takes {peak} times as much memory as with FSDP2 at the "
                f"peak, and {sent} times as many bytes cross the network.")


def speed_chart(told: dict[str, Any]) -> str:
    """
    ## Tokens per second of each way to train, as bars; a line is the range of the rounds

    It is one line of HTML, because it stands in an item of a list.
    """
    speeds = {name: [each[name]["tokens_per_s"] for each in told["rounds"]] for name in PEERS}
    medians = {name: told["medians"][name]["tokens_per_s"] for name in PEERS}
    order = sorted(PEERS, key=lambda name: -medians[name])
    most = max(max(each) for each in speeds.values())
    about = "; ".join(f"{PEERS[name]}: {medians[name]:,.0f}" for name in order)

    def draw(width: float) -> Drawing:
        drawing = Drawing(width, 30 * len(order), "Tokens per second", f"{about}.")
        scale = (width - 200) / most
        for y, name in zip(range(0, 30 * len(order), 30), order, strict=True):
            drawing.text(2, y + 19, PEERS[name])
            drawing.rect(148, y + 4, medians[name] * scale, BAR, "compute")
            drawing.line(148 + min(speeds[name]) * scale, y + 15, 148 + max(speeds[name]) * scale,
                         y + 15, "fg", width=2.5)
            drawing.text(width - 2, y + 19, f"{medians[name]:,.0f}", anchor="end")
        return drawing

    how = f"median and range of {told['settings']['rounds']} rounds"
    caption = f"Tokens per second, {how}; commit {told['machine']['commit']}."
    return figure(draw(WIDE), draw(PHONE), caption).replace("\n", " ")


def compressed_table() -> str:
    """
    ## The models of the recorded run of the compressed job

    `make train ARGS="--compress dense 8 4-half rows-heads"` writes the file anew, in `runs/train`.
    """
    told = json.loads((HERE / "compression.json").read_text())
    caption = (f"A recorded run of {told['steps']} steps from seed {told['seed']}: "
               f"{origin(told, told['ranks'])}.")
    table = rungs.html_table(compressed.compared_rows(told))
    return f"<figure>{table}<figcaption>{escape(caption)}</figcaption></figure>"


def muon_table() -> str:
    """
    ## The main job with two optimizers, recorded

    `make train` and `make train ARGS="--optimizer muon"` print these figures.
    """
    told = json.loads((HERE / "muon.json").read_text())
    caption = (f"Bits per byte of the main job after {told['steps']} steps from seed "
               f"{told['seed']}: {origin(told, told['ranks'])}.")
    rows = [["optimizer", "train", "held out"],
            *([row["optimizer"], f"{row['train']:.3f}", f"{row['held_out']:.3f}"]
              for row in told["runs"])]
    return (f"<figure>{rungs.html_table(rows)}<figcaption>{escape(caption)}</figcaption></figure>")


def middle(values: list[float]) -> str:
    """
    ## A median with the range that was measured
    """
    median, least, most = values
    return f"{median:.2f} ({least:.2f} to {most:.2f})"


def step_time(row: dict[str, float]) -> float:
    """
    ## The time of a step of one run, in a unit that all runs of a case share
    """
    return row["step_ms"] if "step_ms" in row else 1 / row["tokens_per_s"]


def timed_on(told: dict[str, Any], how: str, ranges: str = "the middle half") -> str:
    """
    ## The caption of a table of timings

    * `how` says what was timed
    * `ranges` says which part of the measured ratios the table gives
    """
    machine = told["machine"]
    return (f"<p><small>Measured: {escape(how)}; medians, and {ranges} of the ratios. "
            f"{escape(machine['cpu'])}, torch {machine['torch']}, commit {machine['commit']}."
            "</small></p>")


def ratio(told: dict[str, Any], peer: str, what: str) -> str:
    """
    ## A ratio of two timed runs: median, minimum and maximum
    """
    return middle(told["ratios"][f"zero3/{peer}"][what])


def example() -> dict[str, str]:
    """
    ## The bytes of the example of the first chapter, in GB
    """
    params = 8e9
    ranks = 64
    kept = {f"stage{i}": f"{nbytes / 1e9:.0f}" for i, nbytes in enumerate(stages(params, ranks))}
    return kept | {"all": f"{stages(params, 1)[0] / 1e9:.0f}", "ranks": str(ranks)}


def code_lines(paths: list[Path]) -> int:
    """
    ## How many lines of code these files have, without comments, docstrings and empty lines
    """
    lines = 0
    for path in paths:
        text = path.read_text()
        strings = {number for node in ast.walk(ast.parse(text))
                   if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
                   for number in range(node.lineno, (node.end_lineno or 0) + 1)}
        lines += sum(number not in strings and bool(line.strip()) and line.strip()[0] != "#"
                     for number, line in enumerate(text.split("\n"), 1))
    return lines


def core_files() -> list[Path]:
    """
    ## The source files of the heart, of all communication and of the guards
    """
    chapters = [each for each in (*PATH, *FURTHER)
                if each.name in ("The heart", "Communication", "Groups and links", "Guards")]
    paths = [HERE.parent / item.path for each in chapters for item in each.items]
    return [path for path in paths if path.suffix == ".py"]


def fsdp2_files() -> list[Path]:
    """
    ## The source files of FSDP2, in the installed torch
    """
    import torch.distributed.fsdp._fully_shard as package

    return sorted(Path(package.__path__[0]).glob("_*.py"))


def changed(mutation: Mutation) -> str:
    """
    ## The lines that a mutation removes and adds
    """
    # Without the header, which repeats the line above it.
    diff = "\n".join(mutation.diff().split("\n")[3:])
    return f"<pre>{highlight(diff, DiffLexer(), HtmlFormatter(nowrap=True))}</pre>"


def printed(mutation: Mutation) -> str:
    """
    ## What a program prints with the source, and with the mutation
    """
    return f"<pre>right  {escape(mutation.healthy)}\nwrong  {escape(mutation.symptom)}</pre>"


def colored(code: str) -> str:
    return highlight(code, PythonLexer(), HtmlFormatter(nowrap=True))
