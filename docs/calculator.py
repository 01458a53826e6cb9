r"""
# The calculator: memory and traffic of one rank

The page `calculator.md` answers two questions for any model and any number of ranks: how much
memory does a rank need, and how many bytes move in a step?

The page has no server, so its script has the formulas of `zero3/estimate/formulas.py` a second
time. `compute` has the same numbers from the formulas themselves. A test compares the two in a
browser for hundreds of inputs. So it fails if a formula changes in one of the two places only.

**An example.** A model with 8 billion parameters needs 128 GB on each rank in plain data parallel
training. On 64 ranks with ZeRO-3 it needs 2 GB, and 1.5 GB for the layers that are whole while they
compute:

$$\frac{16 \cdot 8 \cdot 10^9}{64} = 2 \cdot 10^9 \qquad
3 \cdot 2 \cdot \frac{8 \cdot 10^9}{32} = 1.5 \cdot 10^9$$

Without JavaScript the page shows this example as a table, which `table` fills in.

**Run this**: `python -m docs.calculator` prints the example.

**Not covered, and what that costs**: recomputation, which saves fewer activations, and blocks that
save others than GPT-2's. All layers are taken to be equally large, so a large embedding needs more
working memory than the calculator says.
"""

from dataclasses import dataclass

from docs.rungs import html_table, stage_parts
from zero3.estimate.formulas import KINDS, WIDTHS, places, sent_elements
from zero3.estimate.saved import HEAD_WIDTH, activations, gpt2_bytes, gpt2_width

SCHEMES = ("data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3", "ZeRO-3 with offload")
TIERS = {"device": "device", "cpu": "CPU", "nvme": "files"}


@dataclass(frozen=True)
class Question:
    """
    ## The inputs of the calculator

    The default is the example of the page: 8 billion parameters on 64 ranks, with the optimizer
    states in CPU memory.
    """

    params: float = 8e9
    ranks: int = 64
    layers: int = 32
    precision: str = "16"  # one of `WIDTHS`, as text
    params_in: str = "device"
    states_in: str = "cpu"
    sequence: int = 2048
    batch: int = 0  # sequences of a rank in a step; 0 leaves activations out
    activations_in: str = "device"

    @property
    def basis(self) -> int | str:
        return int(self.precision) if self.precision.isdigit() else self.precision


@dataclass(frozen=True)
class Row:
    """
    ## One way of training, and the bytes of one rank
    """

    name: str
    parts: dict[str, dict[str, float]]  # bytes in each tier, by `KINDS` and of activations
    sent_elements: float  # to other ranks, in a step
    sent_bytes: float
    moved: dict[str, float]  # bytes into and out of CPU memory and files, in a step


def compute(q: Question) -> list[Row]:
    """
    ## All numbers of the calculator: a row for each of `SCHEMES`
    """
    nothing = dict.fromkeys(KINDS, 0.0)
    held = [({"device": device, "cpu": nothing, "nvme": nothing}, {"cpu": 0.0, "nvme": 0.0})
            for device in stage_parts(q.params, q.ranks, q.layers, q.basis)]
    chosen = next(place for place in places(q.params, q.ranks, q.layers, q.basis)
                  if (place.params_in, place.states_in) == (q.params_in, q.states_in))
    held.append((chosen.parts, chosen.step_bytes))
    rows = []
    for stage, (name, (parts, moved)) in enumerate(zip(SCHEMES, held, strict=True)):
        sent = sent_elements(q.params, q.ranks, min(stage, 3))
        # Only the last row offloads.
        tier = q.activations_in if stage == 4 else "device"
        parts = {at: kinds | {"activations": 0.0} for at, kinds in parts.items()}
        saved = saved_by_layer(q)
        found = activations(saved, len(saved) if tier == "device" else 1)
        parts["device"]["activations"] = found.memory_bytes
        if tier != "device":
            parts[tier]["activations"] = found.out_bytes
            moved = moved | {tier: moved[tier] + found.out_bytes + found.in_bytes}
        rows.append(Row(name, parts, sent, sent * WIDTHS[q.basis][0], moved))
    return rows


def saved_by_layer(q: Question) -> list[int]:
    """
    ## What autograd saves in each layer, if all of them are blocks of GPT-2, and in a head
    """
    width = gpt2_width(q.params, q.layers)
    return gpt2_bytes(q.layers, width, -(-width // HEAD_WIDTH), q.batch * q.sequence, q.sequence,
                      WIDTHS[q.basis][0])


def table(q: Question | None = None) -> str:
    """
    ## The example as an HTML table, for readers without JavaScript
    """
    q = q or Question()
    rows = [["GB of one rank", *TIERS.values(), "sent in a step"]]
    for row in compute(q):
        held = (sum(row.parts[tier].values()) for tier in TIERS)
        rows.append([row.name, *(f"{nbytes / 1e9:.2f}" for nbytes in (*held, row.sent_bytes))])
    return html_table(rows)


def main() -> None:
    """
    ## Print the example
    """
    for row in compute(Question()):
        held = "  ".join(f"{tier} {sum(row.parts[tier].values()) / 1e9:7.2f} GB" for tier in TIERS)
        print(f"{row.name:20} {held}  sends {row.sent_bytes / 1e9:.2f} GB in a step")


if __name__ == "__main__":
    main()
