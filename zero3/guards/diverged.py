r"""
# Ranks that diverged

`diverged` compares what the ranks of a group are about to send.

If ranks exchanged different layers of equal size, the weights would silently be garbage; with
different sizes gloo ends the process and NCCL hangs. So they announce

$$(\text{layer}, \text{action}, \text{bytes}, \text{mark})$$

The norms' mark has a checksum of the optimizer's options, so another learning rate is noticed, too.

**Run this**: `python -m docs.mutations skip-one`.

**Not covered, and what that costs**: on an accelerator an assertion on the device fails, and the
error comes with the next operation that waits for the device, without ranks and layers. Run the
same program on the CPU, or look at the last collectives with torch's flight recorder
(`TORCH_FR_BUFFER_SIZE`). If a rank ends without an announcement, the others find out by NCCL's
time-out.
"""

import torch

from zero3.guards.options import ACTIONS, ALONE, Announced


def diverged(transfer: Announced,
             ranks: tuple[int, ...],
             rank: int,
             order: torch.Tensor) -> str:
    """
    ## Compare the announcements of all ranks of a group

    * `ranks` are its global ranks, and `rank` is this rank's place among them
    * `order` has their announcements, `(size, 4)` int64, on the device

    Returns the problem, if any. On an accelerator the device compares them itself, unless the host
    is about to wait anyway.
    """
    comm = transfer.comm
    if not (comm.by_messages or transfer.options):
        problem = (f"{transfer.where}: the ranks diverged. Expected: a {transfer.action} of this "
                   "layer on all ranks. Got: another transfer. What to do: run the program on the "
                   "CPU, which names both. Start again.")
        # A GPU takes no longer message.
        torch._assert_async((order == order[rank]).all(), problem[:254])
        return ""
    rows = order.tolist()
    mine = rows[rank]
    for other, row in zip(ranks, rows, strict=True):
        if row != mine:
            if ACTIONS[row[1]] == "fault":
                comm.failed = other
            return (f"{transfer.where}: the ranks diverged. Expected: {told(transfer, mine)}, on "
                    f"all ranks, as here. Got: {told(transfer, row)}, on rank {other}. "
                    f"What to do: {_cure(transfer.options, mine, row, other)}. Start again.")
    return ""


def told(transfer: Announced, row: list[int]) -> str:
    """
    ## What a rank has announced, in words
    """
    idx, number, nbytes, mark = row
    action = ACTIONS[number]
    name = transfer.comm.labels.get(idx, f"layer {idx}")
    if mark >> 32 not in (transfer.comm.met, 0):
        name = f"layer {idx} of another model"
    elif idx == ALONE:
        name = "the gradients" if action in ("norm", "pieces") else "a layer in no chain"
    if action == "save or load":
        return f"a {action} of a checkpoint"
    if action == "fault":
        return f"{action} of {name}"
    return f"{action} of {name}, {nbytes} bytes, layers' checksum {mark % (1 << 32)}"


def _cure(options: str,
          mine: list[int],
          row: list[int],
          other: int) -> str:
    """
    #### What to do about a rank that has announced something else
    """
    if ACTIONS.index("save or load") in (mine[1], row[1]):
        return (f"look for an error on rank {other}; without one, for a rank that has fewer "
                "batches, or saves alone: all ranks save or load after the same step")
    if 0 != row[3] >> 32 != mine[3] >> 32:
        return "wrap models in the same order on all ranks, and call the same one"
    if options and row[:3] == mine[:3]:
        return (f"give the optimizers of all ranks the same options, which are {options} "
                "here; a scheduler that follows the loss, as ReduceLROnPlateau does, needs the "
                "mean loss over all ranks")
    return (f"look for an error on rank {other}; without one, call the same layers in the same "
            "order on all ranks" + ", and use all of their parameters" * (row[:3] == mine[:3]))
