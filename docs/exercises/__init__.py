r"""
# Exercises

Write the central functions of ZeRO-3 yourself, one at a time, in the place of the real ones.

Each exercise is a file with a task and a function to fill in. A checker puts your function into the
real `Zero3Layer`, starts ranks on the CPU, and compares what happens with plain PyTorch and with
the predicted bytes. What the code keeps at all times is numbered I1 to I10, in the table of
[`zero3`](../../zero3/__init__.py); a check that fails names the one that broke.

**Run this**: `make exercise` lists the exercises; `make exercise N=1` checks your answer to the
first; `make exercise N=1 ARGS=--solution` shows a solution, and checks that.

**Not covered, and what that costs**: the checks run on the CPU, where a missing wait for a stream
does not show.
"""
