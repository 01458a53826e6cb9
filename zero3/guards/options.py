r"""
# Options: check arguments, and say what is wrong

`whole` checks a number, and `expect` raises the error. `same` raises one if ranks differ.
`Named` raises errors under its own name.

`nan < 1` is false and so is `nan > 9`, so a NaN seems neither too small nor too large. And in
Python, `True` equals 1. So the checks here ask for right values, and refuse the rest:

$$\text{least} \le \text{value} \le \text{most}$$

**Run this**: `python -m zero3.estimate --params 0 --ranks 2`.

**Not covered, and what that costs**: values of tensors, and models. The layers check these.
"""

from collections.abc import Mapping, Sequence
from typing import Any

# The largest number that torch takes as a size.
MOST = 2**63 - 1


def whole(value: Any,
          least: int = 0,
          most: int = MOST) -> bool:
    """
    ## Whether the value is a whole number within limits

    It may be a number of another library that can be an index. `True` is no number here.
    """
    return (hasattr(type(value), "__index__") and not isinstance(value, bool)
            and least <= value <= most)


def expect(good: bool,
           what: str,
           expected: object,
           got: object,
           cure: str,
           kind: type[Exception] = ValueError) -> None:
    """
    ## Raise an error if an option cannot work

    * `good` says whether it can
    * `what` is the problem, `expected` a right value, `got` the value that was passed, and `cure`
      a remedy
    * `kind` is the class of the error
    """
    if not good:
        raise kind(f"{what}. Expected: {expected}. Got: {got}. What to do: {cure}.")


def same(what: str,
         ranks: Sequence[int],
         every: Sequence[Mapping[str, object]],
         cure: str,
         kind: type[Exception] = RuntimeError) -> None:
    """
    ## Raise an error on all ranks if they do not have the same values

    * `every` has the values of each of these ranks, by their names
    * `what`, `cure` and `kind` are as for `expect`
    """
    first = every[0]
    for rank, theirs in zip(ranks, every, strict=True):
        for name in {**first, **theirs}:
            here = first.get(name, "none")
            there = theirs.get(name, "none")
            if here != there:
                expect(False, what, f"the same {name} on all ranks",
                       f"{here!r} on rank {ranks[0]}, and {there!r} on rank {rank}", cure, kind)


class Named:
    """
    ## Whatever raises errors under its own name: a layer, a model, an optimizer, a checkpoint
    """

    label: str  # what errors call it
    comm: Any  # its communicator, which has the number of this rank

    def expect(self, good: bool,
               what: str,
               expected: object,
               got: object,
               cure: str) -> None:
        """
        ### Raise `RuntimeError` unless this is good
        """
        if not good:
            expect(False, f"rank {self.comm.global_rank}: {self.label} {what}", expected, got, cure,
                   RuntimeError)
