"""
# Run the notebooks

Executes each notebook from its source, the `.py` file, and holds what it prints against the
`.ipynb` beside it.

A notebook that was executed long ago shows what was true then. So what is kept is compared with
what comes out now: a cell whose text differs is named, and so is one that is no longer the
source's. Pictures have to be there, and are not compared. What differs from run to run by its
nature is in a cell with the tag `varies`.

**Run this**: `make notebooks`; `make notebooks ARGS=--write` keeps what comes out.

**Not covered, and what that costs**: what is kept was executed on two ranks on a CPU. On a machine
with GPUs the notebooks run on these, and only errors are found.
"""

import argparse
import sys
from pathlib import Path

import jupytext
import nbformat
import torch
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
NOTEBOOKS = sorted(FOLDER.glob("[0-9]*.py"))


def execute(source: Path) -> nbformat.NotebookNode:
    """
    ## Execute a notebook, in a kernel of its own

    Raises `CellExecutionError` with the traceback of the cell that fails.
    """
    notebook = jupytext.read(source)
    NotebookClient(notebook, timeout=300, kernel_name="python3",
                   resources={"metadata": {"path": str(FOLDER)}}).execute()
    # What says when and where, and not what: two runs are the same to the byte.
    notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"]}
    for i, cell in enumerate(notebook.cells):
        cell.id = f"cell-{i}"
        cell.metadata.pop("execution", None)
    return notebook


def joined(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """
    ## Outputs of a cell; what is printed in one go may come in several pieces
    """
    kept: list[nbformat.NotebookNode] = []
    for output in outputs:
        # Only a stream has a name.
        if kept and output.get("name") and output.name == kept[-1].get("name"):
            kept[-1] = nbformat.from_dict({**kept[-1], "text": kept[-1].text + output.text})
        else:
            kept.append(output)
    return kept


def texts(cell: nbformat.NotebookNode) -> list[str]:
    """
    ## What a cell prints and shows; of a picture, that there is one
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
    ## What of a notebook is not what was kept, a line for each cell
    """
    if [(c.cell_type, c.source) for c in kept.cells] != [
            (c.cell_type, c.source) for c in now.cells]:
        return ["the cells are not those of the source"]
    return [f"cell {i} was {texts(old)}, is {texts(new)}"
            for i, (old, new) in enumerate(zip(kept.cells, now.cells, strict=True))
            if texts(old) != texts(new) and "varies" not in new.metadata.get("tags", ())]


def check(source: Path, write: bool = False) -> list[str]:
    """
    ## Execute, and compare or keep
    """
    now, path = execute(source), source.with_suffix(".ipynb")
    if write:
        nbformat.write(now, path)
    if not path.exists():
        return ["nothing is kept: `make notebooks ARGS=--write`"]
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
    parser.add_argument("names", nargs="*", help="beginnings of names, such as 03; all if none")
    parser.add_argument("--write", action="store_true", help="keep what comes out")
    args = parser.parse_args(argv)
    chosen = [path for path in NOTEBOOKS if path.name.startswith(tuple(args.names) or "")]
    if not chosen:
        parser.error(f"expected the beginning of a notebook's name, got {args.names}")
    if args.write and torch.cuda.is_available():
        parser.error("expected no GPU, for what is kept is of two ranks on a CPU; set "
                     "CUDA_VISIBLE_DEVICES= to hide them")
    failed = 0
    for source in chosen:
        found = check(source, args.write)
        print(f"{source.stem}: {'; '.join(found) or 'as it was kept'}", flush=True)
        failed += bool(found)
    return failed


if __name__ == "__main__":
    sys.exit(main())
