r"""
# Memory in flight

`InFlight` knows the memory that a message, a thread or a stream may still use. Code that resizes
memory asks it first.

gloo's thread has an address and a length, and knows nothing of tensors. If a buffer is freed before
the last rank's part has arrived, that part is written into the memory of another tensor. The
program crashes later, in another place, once in many runs. A rank that *sends* from freed memory
sends wrong numbers.

**Three ranks gather 1 2 3**, one element each, and rank 1 has an error at the same moment:

| moment | rank 0 | its buffer |
|---|---|---|
| it starts the gather | waits for two elements | 1 . . |
| rank 1 announces its error | raises it; the forward pass ends | 1 . . |
| the layer is cleaned up | **would free 12 bytes** | 1 . . |
| the 3 of rank 2 was on its way | gloo writes 4 bytes at offset 8 | 1 . 3 |

The cleanup cannot wait, because rank 1 will never send. So before a transfer starts,
its owner names the memory (`begin`). After a successful wait it says that the transfer is done
(`end`). In between nobody frees, resizes or reuses this memory. If the wait or the start
fails, the memory is kept for good (`lose`):

$$\text{freed} \cap \text{in flight} = \emptyset$$

After an error only its announcement is sent (`announce_fault`), so hardly more memory is
lost.

**Who frees or reuses memory, and why nobody uses it then:**

| place | memory | nobody uses it, because |
|---|---|---|
| `Zero3Layer` | the flat parameter | `_cleanup_params` has waited for the gather |
| `Communicator.all_gather` | the same | it is empty; or it is whole, and is not resized |
| `as_receive_buffer` | the same, for gradients | the layer's backward is over |
| `add_reduced` | the same | the wait for the reduce has succeeded |
| `Reducer.delivered` | a gradient in pinned memory | the host has waited for the copy |
| `Encoded.release` | a decoded shard | it was copied, and the copy is sent |
| `Buffers.borrow` | a buffer of files | its threads have ended, and so has the copy from it |
| `Copy.rest` | an activation | dropped after the wait for its copy |
| `Buffers.take` | a file of activations | the threads that moved its last blocks have ended |
| `Channels.end` | activations that were sent | dropped after the wait, and kept after an error |
| `compression/freeing.py` | a compressed weight | only the compute stream uses it |
| `FreedParameter.of_shard` | memory that was never filled | nobody knows it |

As long as no rank has failed, freeing memory in flight would be a mistake of this package, and an
assertion fails.

A tensor that is *dropped* needs no such care, because its message has a reference to it. Only
resizing frees memory that is still referred to.

**Run this**: `python -m pytest tests/test_in_flight.py`.

**Not covered, and what that costs**: on an accelerator a wait stops a stream and not the host,
and streams reuse memory in order; the table in `comm/collectives.py` says who waits for whom.
What has failed is kept until the process ends, and its model with it.
"""

import weakref

import torch


class InFlight:
    """
    ## The owner of memory in flight

    There is one for the process, `in_flight`.
    """

    def __init__(self) -> None:
        # Each `Transfer` or copy in flight, with the storages that it uses: the addresses of
        # torch's objects, which stay the same when storages are resized. Weakly: whoever starts a
        # transfer keeps it until its wait, and after a failure `lost` does.
        self.users: weakref.WeakKeyDictionary[object, set[int]] = weakref.WeakKeyDictionary()
        # Those that have failed. Other ranks may still wait for their messages, and send to them.
        self.lost: list[object] = []

    def begin(self, user: object, *tensors: torch.Tensor) -> None:
        """
        ### A transfer is about to use these tensors

        * `user` is the transfer, or a copy; it may begin several times, with more tensors
        """
        storages = self.users.setdefault(user, set())
        storages.update(tensor.untyped_storage()._cdata for tensor in tensors)

    def end(self, user: object) -> None:
        """
        ### A transfer is done
        """
        self.users.pop(user, None)

    def lose(self, user: object) -> None:
        """
        ### A transfer has failed: its memory and its messages are kept until the process ends
        """
        if user in self.users and user not in self.lost:
            self.lost.append(user)

    def user_of(self, tensor: torch.Tensor) -> object:
        """
        ### What uses this tensor's memory, or `None`
        """
        storage = tensor.untyped_storage()._cdata
        return next((user for user, storages in self.users.items() if storage in storages), None)

    def free(self, tensor: torch.Tensor) -> None:
        """
        ### Give the memory of a tensor back, unless something that was lost keeps it

        It is not enough to drop a flat parameter, because autograd keeps views of it for backward.
        """
        self.resize(tensor, 0)

    def resize(self, tensor: torch.Tensor, nbytes: int) -> None:
        """
        ### Give a tensor's storage another size

        All views of the storage still exist. Nothing happens if it has this size already: torch
        would allocate it again and copy.
        """
        storage = tensor.untyped_storage()
        if storage.nbytes() != nbytes:
            user = self.user_of(tensor)
            assert user is None or user in self.lost, (
                f"{user} is in flight, and its memory is about to be resized")
            if user is None:
                storage.resize_(nbytes)


in_flight = InFlight()
