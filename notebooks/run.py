"""
# Run the notebooks

Executes each notebook from its source, the `.py` file, and compares the output with the stored
`.ipynb` file.

A kernel imports torch and matplotlib, and the server that forks its ranks imports torch once more:
together that takes longer than most notebooks do. So kernels and ranks are forked from one server,
which has imported both.

The stored output of a notebook becomes wrong when the code changes. So each run reports the cells
with a different text, and the cells that differ from the source. A picture has to exist, but its
pixels are not compared. Cells whose output differs from run to run, or from one kind of processor
to another, have the tag `varies`.

**Run this**: `make notebooks`; `make notebooks ARGS=--write` stores the new output.

**Not covered, and what that costs**: the stored output comes from ranks on a CPU. On a machine
with GPUs the notebooks run on the GPUs, and the check only finds errors. In Jupyter the text that a
rank prints appears below the cell. Here it appears in the terminal, and is not compared.
"""

import argparse
import multiprocessing
import os
import re
import sys
import threading
from multiprocessing import forkserver, parent_process, resource_tracker
from pathlib import Path
from typing import Any

import jupytext
import matplotlib.pyplot as plt
import nbformat
import torch
from ipykernel.kernelapp import IPKernelApp
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

from zero3.train import launch

FOLDER = Path(__file__).parent
NOTEBOOKS = sorted(FOLDER.glob("[0-9]*.py"))
BACKEND = "module://matplotlib_inline.backend_inline"


def execute(source: Path) -> nbformat.NotebookNode:
    """
    ## Execute a notebook, in a kernel of its own

    Raises `CellExecutionError` with the traceback of the cell that fails.
    """
    notebook = jupytext.read(source)
    NotebookClient(notebook, timeout=300, kernel_name="python3",
                   kernel_manager_class=ForkedKernel).execute()
    # Remove times and paths, so that two runs give the same bytes.
    notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"]}
    for i, cell in enumerate(notebook.cells):
        cell.id = f"cell-{i}"
        cell.metadata.pop("execution", None)
    return notebook


class ForkedKernel(AsyncKernelManager):
    """
    ## A kernel that is forked from the server of the ranks
    """

    async def _async_launch_kernel(self, kernel_cmd: list[str], **options: Any) -> None:
        """
        #### Fork it, in place of the command that would start a new Python
        """
        assert self.provisioner is not None
        context = multiprocessing.get_context("forkserver")
        process = context.Process(target=kernel, args=(self.connection_file,))
        process.start()
        self.provisioner.process = Started(process)


class Started:
    """
    ## A forked process with the methods of one that is started by a command
    """

    stdin = stdout = stderr = None

    def __init__(self, process: multiprocessing.process.BaseProcess):
        self.process = process

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self) -> int | None:
        self.process.join()
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


def kernel(connection_file: str) -> None:
    """
    ## The main function of a kernel's process

    * `connection_file` says where the other process expects it
    """
    threading.Thread(target=end_with_parent, daemon=True).start()
    os.chdir(FOLDER)
    # Ranks import the files that cells write to this folder.
    sys.path.insert(0, str(FOLDER))
    # A process that was forked would start a server of its own for its ranks.
    forkserver._forkserver.ensure_running = (  # type: ignore[attr-defined]
        resource_tracker.ensure_running)
    # A kernel tells matplotlib how to draw before it is imported. Here it has been imported.
    plt.rcParams["backend"] = BACKEND
    app = IPKernelApp.instance()
    app.initialize(["-f", connection_file])
    app.start()


def end_with_parent() -> None:
    """
    ## End this process when the one that wants the notebook has ended
    """
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def imports() -> list[str]:
    """
    ## The modules that notebooks want to have imported once for all ranks
    """
    text = "\n".join(path.read_text() for path in NOTEBOOKS)
    calls = re.findall(r"^preload\((.*?)\)", text, re.DOTALL | re.MULTILINE)
    return re.findall(r'"([\w.]+)"', " ".join(calls))


def joined(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """
    ## The outputs of a cell, with pieces of one printed text joined
    """
    kept: list[nbformat.NotebookNode] = []
    for output in outputs:
        # Only printed text has a name, such as stdout.
        if kept and output.get("name") and output.name == kept[-1].get("name"):
            kept[-1] = nbformat.from_dict({**kept[-1], "text": kept[-1].text + output.text})
        else:
            kept.append(output)
    return kept


def texts(cell: nbformat.NotebookNode) -> list[str]:
    """
    ## The printed text and the results of a cell; pictures without their pixels
    """
    found: list[str] = []
    for output in joined(cell.get("outputs", [])):
        if output.output_type == "stream":
            found.append(f"{output.name}: {output.text}")
        elif output.output_type == "error":
            found.append(f"{output.ename}: {output.evalue}")
        else:
            shown = {kind: "" if kind == "image/png" else text
                     for kind, text in output.data.items() if "image/png" not in output.data
                     or kind == "image/png"}
            found.append(f"{output.output_type}: {sorted(shown.items())}")
    return found


def differences(kept: nbformat.NotebookNode, now: nbformat.NotebookNode) -> list[str]:
    """
    ## The differences from the stored notebook, one line per cell
    """
    if [(c.cell_type, c.source) for c in kept.cells] != [
            (c.cell_type, c.source) for c in now.cells]:
        return ["the cells differ from those of the source"]
    return [f"cell {i} was {texts(old)}, is {texts(new)}"
            for i, (old, new) in enumerate(zip(kept.cells, now.cells, strict=True))
            if texts(old) != texts(new) and "varies" not in new.metadata.get("tags", ())]


def check(source: Path, write: bool = False) -> list[str]:
    """
    ## Execute a notebook, and compare or store its output
    """
    now = execute(source)
    path = source.with_suffix(".ipynb")
    if write:
        nbformat.write(now, path)
    if not path.exists():
        return ["no output is stored: run `make notebooks ARGS=--write`"]
    kept = nbformat.read(path, as_version=4)
    if torch.cuda.is_available():
        for cell in (*kept.cells, *now.cells):
            cell.pop("outputs", None)
    return differences(kept, now)


def main(argv: list[str] | None = None) -> int:
    """
    ## The command line
    """
    parser = argparse.ArgumentParser(prog="notebooks.run", description="Execute all notebooks.")
    parser.add_argument("names", nargs="*", help="beginnings of names, such as 03; default: all")
    parser.add_argument("--write", action="store_true", help="store the new output")
    args = parser.parse_args(argv)
    chosen = [path for path in NOTEBOOKS if path.name.startswith(tuple(args.names) or "")]
    if not chosen:
        parser.error(f"expected the beginning of a notebook's name, got {args.names}")
    if args.write and torch.cuda.is_available():
        parser.error("expected no GPU, because the stored output is of ranks on a CPU; set "
                     "CUDA_VISIBLE_DEVICES= to hide the GPUs")
    launch.preload("notebooks.run", *imports())
    failed = 0
    for source in chosen:
        found = check(source, args.write)
        print(f"{source.stem}: {'; '.join(found) or 'same output as stored'}", flush=True)
        failed += bool(found)
    return failed


if __name__ == "__main__":
    sys.exit(main())
