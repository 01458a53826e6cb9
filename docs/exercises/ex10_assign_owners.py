r"""
# Exercise 10: who steps which matrix

For Muon each matrix has one owner among the ranks, which steps it. Four matrices, whose steps take
4, 3, 3 and 2 units of time:

| | rank 0 | rank 1 | the step takes |
|---|---|---|---|
| in turn | 4 + 3 | 3 + 2 | 7 |
| **the longest first, each to the rank with the least to do** | 4 + 2 | 3 + 3 | **6** |

**Given**

* `costs`: the time of each matrix, integers from 0 up, in the order of the model
* `ranks`: the number of ranks

**Return** a list with the owner of each matrix, in the order of `costs`, from 0 to `ranks` - 1.

**Keeps** I6: all ranks return the same list, without sending anything. Time: no division of the
matrices lets the slowest owner finish in less than $\frac{3N}{4N-1}$ of the time of yours on $N$
ranks ([Graham, 1969](https://doi.org/10.1137/0117039)).

**Hint**: sort the positions of the matrices, and not the matrices.
"""


def assign(costs: list[int], ranks: int) -> list[int]:
    """
    ## The owner of each matrix

    Returns the same list on all ranks.
    """
    raise NotImplementedError("exercise 10: begin with the matrix that takes longest, and give "
                              "each to the rank that has the least to do so far")
