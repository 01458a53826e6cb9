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

import json
import re
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import DiffLexer, PythonLexer

from docs import ladder, tape
from docs.annotate import Source, slug
from docs.exercises.solutions import EXERCISES, page
from docs.mutations import all_with_lines
from zero3.estimate.formulas import places

HERE = Path(__file__).parent
# A number with one of these units was measured.
MEASURED = re.compile(r"\d[\d.,]*\s?(?:[kKMGT]i?B|bytes|[mµu]?s|seconds|minutes|hours|tok\w*|"
                      r"times (?:as|faster)|x|×|%)(?!\w)")


class Figures:
    """
    ## All measured figures, by name
    """

    def __init__(self) -> None:
        """
        ### Record the tape and run the ladder
        """
        self.problems: list[str] = []
        self.tape = tape.record()
        self.ladder = ladder.climb()
        self.mutations = {(m.file, last): (m, first) for m, first, last in all_with_lines()}
        # Files to write beside the pages.
        self.files = {"tape-data.js": f"const TAPE = {json.dumps(self.tape)};\n",
                      "trace.json": json.dumps(tape.chrome_trace(self.tape))}
        self.values: dict[str, Callable[[], str] | str] = {
            # On a phone the text of the wide figure would be too small.
            "staircase": f'<figure class="on-wide">{tape.staircase(self.tape)}</figure>'
                         f'<figure class="on-phone">{tape.staircase(self.tape, 360)}</figure>',
            "tape.caption": caption(self.tape, self.tape["world_size"]),
            "ladder.caption": caption(self.ladder, self.ladder["ranks"]),
            "ladder.figure": f'<figure>{ladder.draw(self.ladder["rows"])}</figure>',
            "ladder.table": self.rungs, "ladder.losses": self.losses,
            "mutations": self.all_mutations, "exercises": self.exercises,
            "bench.sentence": self.speed,
        }
        # Bytes that a step reads from and writes to a tier, for one parameter on one rank.
        for place in places(1, 1):
            self.values |= {f"moves.{tier}.{place.params_in}.{place.states_in}": f"{moved:.0f}"
                            for tier, moved in place.step_bytes.items()}

    def fill(self, name: str, text: str, proofs: dict[str, str]) -> str:
        """
        ### Fill the placeholders of a page's markdown with figures

        * `proofs` are the tests of each invariant, as HTML
        """
        typed = MEASURED.search(re.sub(r"```.*?```|`[^`]*`|\$[^$]*\$", "", text, flags=re.DOTALL))
        if typed:
            self.problems.append(f"{name}: `{typed[0]}` is typed, and not filled in")

        def value(found: re.Match) -> str:
            known = proofs.get(found[1].removeprefix("proofs."), self.values.get(found[1]))
            if known is None:
                self.problems.append(f"{name}: there is no figure `{found[1]}`")
            return str(known() if callable(known) else known)

        return re.sub(r"\{\{([\w.]+)\}\}", value, text)

    def write(self, out: Path) -> None:
        """
        ### Write the data files of the pages' scripts
        """
        for name, text in self.files.items():
            (out / name).write_text(text)

    # ------------------------------------------------------------------------------------- ladder

    def rungs(self) -> str:
        """
        ### The ladder as a table
        """
        columns = {"device_rest_bytes": "device, after a step", "device_peak_bytes": "at its peak",
                   "cpu_bytes": "CPU memory", "file_bytes": "files", "sent_bytes": "sent in a step"}
        rows = [["", "sharded", *columns.values()]]
        rows += [[row["rung"], row["sharded"] or "nothing", *(f"{row[c]:,}" for c in columns)]
                 for row in self.ladder["rows"]]
        return ("Bytes per rank. After a step means with its gradients, as ZeRO counts:\n\n"
                + table(rows, 2))

    def losses(self) -> str:
        """
        ### The losses of each rung
        """
        steps = [f"step {i + 1}" for i in range(self.ladder["steps"])]
        rows = [["", *steps, "losses, compared with DDP", "weights, compared with DDP"]]
        for row in self.ladder["rows"]:
            off = [f"{row[key]:.0e} difference" if row[key] else "equal"
                   for key in ("loss_difference", "weight_difference")]
            rows.append([row["rung"], *(f"{loss:.4f}" for loss in row["losses"]), *off])
        return table(rows, 1)

    # ------------------------------------------------------------------------- mutations, exercises

    def beside(self, file: str, lines: list[int]) -> str:
        """
        ### The mutations of these lines, to be shown beside them
        """
        return "".join(
            f'<details class="mutation"><summary>without line '
            f'{first if first == last else f"{first} to {last}"}</summary>'
            f'<pre>{escape(m.symptom)}</pre><a href="mutations.html#{slug(m.title)}">{m.title}</a>'
            "</details>"
            for (name, last), (m, first) in self.mutations.items()
            if name == file and last in lines)

    def all_mutations(self) -> str:
        """
        ### Each mutation: the change, and its folded effect
        """
        parts = []
        for (file, last), (m, first) in self.mutations.items():
            # Skip the header, which repeats the line above the diff.
            diff = highlight("\n".join(m.diff().split("\n")[3:]), DiffLexer(),
                             HtmlFormatter(nowrap=True))
            parts.append(
                f"## {m.title}\n\n[`{m.section}`](../zero3/{file}#L{first}), line {first}"
                + f" to {last}" * (last > first) + f"\n\n<pre>{diff}</pre>\n\n"
                "<details><summary>What happens</summary>\n\n"
                f"<pre>{escape(m.healthy)}   before\n{escape(m.symptom)}   after</pre>\n\n{m.why}"
                + f" It breaks {m.breaks}." * bool(m.breaks) + "\n\n</details>\n")
        return "\n".join(parts)

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
        told = json.loads((HERE / "bench.json").read_text())
        changed = [name for name, digest in told["code"].items()
                   if Source(HERE.parent / name).digest() != digest]
        if changed:
            self.problems.append(f"bench.json: {', '.join(changed)} changed since it was timed; "
                                 '`make bench ARGS="--out docs/bench.json"`')
        machine = told["machine"]
        fsdp2, ddp = ("{:.2f} ({:.2f} to {:.2f})".format(
            *told["ratios"][f"zero3/{peer}"]["tokens_per_s"]) for peer in ("fsdp2", "ddp"))
        return (f"Per second, `zero3` trains {fsdp2} times as many tokens as FSDP2, and {ddp} "
                "times as many as `DistributedDataParallel`, which shards nothing "
                f"({told['settings']['ranks']} ranks, {machine['gpu'] or machine['cpu']}, torch "
                f"{machine['torch']}, commit {machine['commit']}; median, minimum and "
                f"maximum of {told['settings']['rounds']} rounds).")


def caption(run: dict[str, Any], ranks: int) -> str:
    """
    ## The caption of a figure: its origin
    """
    return f"{ranks} ranks, {run['device']}, torch {run['torch']}, commit {run['commit']}"


def table(rows: list[list[str]], words: int) -> str:
    """
    ## An HTML table

    * `rows` are its cells; the first row is the header
    * `words` is the number of columns on the left that contain words, not numbers
    """
    lines = []
    for i, row in enumerate(rows):
        tag = "td" if i else "th"
        lines.append("<tr>" + "".join(
            f'<{tag}{" class=number" * (j >= words)}>{escape(cell)}</{tag}>'
            for j, cell in enumerate(row)) + "</tr>")
    return '<div class="wide"><table>' + "\n".join(lines) + "</table></div>"


def colored(code: str) -> str:
    return highlight(code, PythonLexer(), HtmlFormatter(nowrap=True))
