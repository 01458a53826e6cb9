"""
# Run the notebooks

Executes each notebook from its source, the `.py` file, and compares the output with the stored
`.ipynb` file.

The stored output of a notebook becomes wrong when the code changes. So each run reports the cells
with a different text, and the cells that differ from the source. A picture has to exist, but its
pixels are not compared. Cells whose output differs from run to run, or from one kind of processor
to another, have the tag `varies`.

**Run this**: `make notebooks`; `make notebooks ARGS=--write` stores the new output.

**Not covered, and what that costs**: all notebooks share a kernel, which forgets their names, but
not the modules that they have imported. `make notebooks ARGS=03` runs one alone. The stored output
comes from ranks on a CPU. On a machine with GPUs the notebooks run on the GPUs, and the check only
finds errors.
"""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jupytext
import nbformat
import torch
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
NOTEBOOKS = sorted(FOLDER.glob("[0-9]*.py"))


@contextmanager
def kernel() -> Iterator[NotebookClient]:
    """
    ## A kernel, which may execute several notebooks
    """
    # Nothing is left to save, and a kernel with torch takes seconds to leave by itself.
    client = NotebookClient(nbformat.v4.new_notebook(), timeout=300, kernel_name="python3",
                            shutdown_kernel="immediate",
                            resources={"metadata": {"path": str(FOLDER)}})
    with client.setup_kernel():
        yield client


def execute(source: Path, client: NotebookClient) -> nbformat.NotebookNode:
    """
    ## Execute a notebook, in a kernel that has forgotten the names of the one before

    Raises `CellExecutionError` with the traceback of the cell that fails.
    """
    client.nb = notebook = jupytext.read(source)
    # `%reset` would also take what the module `__main__` needs to start ranks.
    client.kc.execute("%reset_selective -f .")
    client.execute(cleanup_kc=False)
    # Remove times and paths, so that two runs give the same bytes.
    notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"]}
    for i, cell in enumerate(notebook.cells):
        cell.id = f"cell-{i}"
        cell.metadata.pop("execution", None)
        for output in cell.get("outputs", ()):
            # The kernel goes on counting from one notebook to the next.
            if "execution_count" in output:
                output.execution_count = cell.execution_count
    return notebook


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


def check(source: Path, client: NotebookClient, write: bool = False) -> list[str]:
    """
    ## Execute a notebook, and compare or store its output
    """
    now = execute(source, client)
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
    failed = 0
    with kernel() as client:
        for source in chosen:
            found = check(source, client, args.write)
            print(f"{source.stem}: {'; '.join(found) or 'same output as stored'}", flush=True)
            failed += bool(found)
    return failed


if __name__ == "__main__":
    sys.exit(main())
