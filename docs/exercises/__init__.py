r"""
# Exercises

Write the central functions of ZeRO-3 yourself. Your function takes the place of the real one.

Each exercise is a file with a task and one or two functions to fill in. A checker puts your
function into the real `Zero3Layer`, starts ranks on the CPU, and compares the results with plain
PyTorch and with the predicted bytes. The invariants, statements that hold throughout training, are
numbered I1 to I10 in the table of [`zero3`](../../zero3/__init__.py). If a check fails, the
checker names the invariant that is broken.

**Run this**: `make exercise` lists the exercises; `make exercise N=1` checks your answer to the
first; `make exercise N=1 ARGS=--solution` shows a solution and checks it.

**Not covered, and what that costs**: the checks run on the CPU. They do not notice if one stream
of a GPU fails to wait for another.
"""
