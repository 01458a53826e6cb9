r"""
# Nodes for tests: several machines with a slow link between them, on one machine

`nodes(...)` builds them, and `Testbed.run` calls a worker on each of their ranks.

A node is a *network namespace*: a network of its own, with a loopback, an address, and an interface
called `uplink`. A cable (a pair of interfaces, *veth*) leads from there to a switch. A *token
bucket* (`tc ... tbf`) at each end of the cable limits how much passes in a second. Two nodes of two
ranks each:

| | node 0 | node 1 |
|---|---|---|
| address | 10.0.0.1 | 10.0.0.2 |
| ranks | 0 1 | 2 3 |
| rank 0 sends to rank 1 | through the loopback, without a limit | |
| rank 0 sends to rank 2 | through `uplink`, 200 Mbit in a second | |

All ranks of a node have the same address, so the kernel carries what they send each other on the
loopback. The bytes that it counts on `uplink` are therefore the bytes between nodes, with headers
and acknowledgements. A packet has 66 bytes of headers, so

$$\text{payload} = \text{bytes} - 66 \cdot \text{packets}$$

**Nothing stays behind.** The namespaces have no names. The kernel removes one, and its interfaces,
as soon as no process has it open. A rank ends when the process that started it ends, even if that
one was killed. The network of the machine itself is never changed.

**Run this**: `python -m pytest tests/comm/test_nodes.py`.

**Not covered, and what that costs**: latency. A message crosses an idle link in microseconds, so
many small messages cost less here than on a real network. All nodes share the cores and the memory
of one machine. It needs Linux, root, and the programs `ip` and `tc`. `why_not` says what is
missing.
"""

import ctypes
import functools
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

# `tests.ranks` chooses which modules the ranks import once.
import tests.ranks  # noqa: F401
from zero3.train import launch

# The kernel's number for network namespaces.
CLONE_NEWNET = 0x40000000
# Ethernet, IPv4, TCP, and TCP's time stamps.
HEADER_BYTES = 14 + 20 + 20 + 12
# The kernel passes data on in packets of up to 64 KiB, and counts one header for each.
MTU_BYTES = 65000
# Four such packets. A bucket that holds less than one would cut packets up, and one that holds many
# would give each transfer a head start.
BURST_BYTES = 4 * (MTU_BYTES + 14)
# Longer than any queue, because the kernel drops packets that do not fit, and sends them again.
QUEUE_BYTES = 1 << 28


@contextmanager
def nodes(count: int = 2, ranks_each: int = 2, mbit: float = 200) -> Iterator["Testbed"]:
    """
    ## Build nodes with a slow link between them

    * `count` is the number of nodes, and `ranks_each` the number of ranks on each
    * `mbit` is the rate at which a node can send, and also receive, in 1e6 bits per second

    Raises `RuntimeError` or `OSError` if this machine does not permit it; see `why_not`.
    """
    with ExitStack() as stack:
        switch = stack.enter_context(_namespace())
        fds = [stack.enter_context(_namespace()) for _ in range(count)]
        _configure(switch, "ip", ["link add switch type bridge",
                                  "link set switch addrgenmode none up"])
        for node, fd in enumerate(fds):
            _plug_in(node, fd, switch, mbit)
        yield Testbed(fds, ranks_each)


class Traffic(NamedTuple):
    """
    ## What one node has sent to the others
    """

    sent_bytes: int  # with headers
    packets: int

    @property
    def payload_bytes(self) -> int:
        return self.sent_bytes - HEADER_BYTES * self.packets

    def since(self, earlier: "Traffic") -> "Traffic":
        """
        ### What was sent between two readings
        """
        return Traffic(self.sent_bytes - earlier.sent_bytes, self.packets - earlier.packets)


class Testbed:
    """
    ## Nodes, and the ranks on them

    Node 0 has the first `ranks_each` ranks, node 1 the next, and so on.
    """

    # pytest would take this class for a test.
    __test__ = False

    def __init__(self, fds: list[int], ranks_each: int):
        self.fds = fds
        self.ranks_each = ranks_each
        self.world_size = len(fds) * ranks_each

    def run(self, worker: Callable | str, *args: Any, timeout_s: float = 120) -> list[Any]:
        """
        ### Run a worker on each rank, and return the answers in rank order

        New processes for each call. They join a process group of gloo over `uplink`, and have the
        environment variables of torchrun that say where a rank is.

        The rest is as for `launch.run`.
        """
        with tempfile.TemporaryDirectory() as folder:
            processes = []
            pipes = []
            try:
                for rank in range(self.world_size):
                    pipe, theirs = launch._CONTEXT.Pipe(duplex=False)
                    pipes.append(pipe)
                    process = launch._CONTEXT.Process(
                        target=_rank_of_node, daemon=True,
                        args=(os.getpid(), self._path(rank), self._environment(rank), worker, rank,
                              self.world_size, f"{folder}/store", "cpu", theirs, args))
                    process.start()
                    processes.append(process)
                    theirs.close()
                answers = launch._answers(pipes, timeout_s)
                # Those that have answered leave by themselves, together.
                for process in processes:
                    process.join(timeout=5)
            finally:
                for process in processes:
                    process.kill()
                    process.join()
        return answers

    def link_bytes(self) -> list[Traffic]:
        """
        ### What each node has sent to the others so far, by the kernel's count
        """
        return [_inside(fd, _traffic) for fd in self.fds]

    def dropped_packets(self) -> list[int]:
        """
        ### How many packets each node's link has dropped so far, because its queue was full
        """
        return [_inside(fd, _dropped) for fd in self.fds]

    def _path(self, rank: int) -> str:
        """
        #### The file of the namespace that a rank belongs to
        """
        return _file_of(self.fds[rank // self.ranks_each])

    def _environment(self, rank: int) -> dict[str, str]:
        """
        #### The variables that torchrun would set, and the interface for gloo
        """
        numbers = {"RANK": rank, "WORLD_SIZE": self.world_size,
                   "LOCAL_RANK": rank % self.ranks_each, "LOCAL_WORLD_SIZE": self.ranks_each,
                   "GROUP_RANK": rank // self.ranks_each, "GROUP_WORLD_SIZE": len(self.fds)}
        return {name: str(number) for name, number in numbers.items()} | {
            "GLOO_SOCKET_IFNAME": "uplink"}


def between_nodes() -> Traffic:
    """
    ## What the node of this rank has sent to the others so far

    For use in a worker. All ranks call it. Between the two barriers nobody sends anything.
    """
    dist.barrier()
    traffic = _traffic()
    dist.barrier()
    return traffic


@functools.cache
def why_not() -> str:
    """
    ## The reason why this machine cannot have nodes, or an empty text if it can
    """
    if sys.platform != "linux":
        return "nodes need Linux"
    if os.geteuid():
        return "only root can make nodes"
    missing = [program for program in ("ip", "tc") if not shutil.which(program)]
    if missing:
        return f"nodes need {' and '.join(missing)}, of the package iproute2"
    try:
        with nodes(ranks_each=1):
            return ""
    except (RuntimeError, OSError) as error:
        return str(error)


# ------------------------------------------------------------------------------------ in the rank


def _rank_of_node(starter: int, path: str, environment: dict[str, str], *args: Any) -> None:
    """
    #### The main function of a rank's process: enter the node, and go on as any rank does

    * `starter` is the process that wants the answer
    """
    gone = os.pidfd_open(starter)
    threading.Thread(target=_end_with, args=(gone,), daemon=True).start()
    with open(path) as namespace:
        _enter(namespace.fileno())
    os.environ.update(environment)
    launch._rank(*args)


def _end_with(gone: int) -> None:
    """
    #### End this process when another one has ended

    The others of its ranks would wait for a message for a minute, and keep the node.
    """
    select.select([gone], [], [])
    os._exit(1)


# ------------------------------------------------------------------------------------- the network


@contextmanager
def _namespace() -> Iterator[int]:
    """
    #### A new network namespace, as an open file

    The kernel keeps it as long as the file is open or a process is inside.
    """
    fd = _in_thread(_new_namespace)
    try:
        yield fd
    finally:
        os.close(fd)


def _new_namespace() -> int:
    _check(ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET), "make a network namespace")
    mine = "/proc/thread-self/ns/net"
    # Otherwise the commands that follow would change the network of the machine itself.
    if os.path.samefile(mine, "/proc/self/ns/net"):
        raise RuntimeError("cannot make a network namespace: still in the one of the process")
    return os.open(mine, os.O_RDONLY)


def _enter(fd: int) -> None:
    """
    #### Go into a namespace, with this thread and the threads and processes that it starts
    """
    _check(ctypes.CDLL(None, use_errno=True).setns(fd, CLONE_NEWNET), "enter a network namespace")


def _check(result: int, what: str) -> None:
    if result:
        raise RuntimeError(f"cannot {what}: {os.strerror(ctypes.get_errno())}")


def _inside(fd: int, does: Callable[[], Any]) -> Any:
    """
    #### Call a function in a namespace
    """
    def call():
        _enter(fd)
        return does()

    return _in_thread(call)


def _in_thread(does: Callable[[], Any]) -> Any:
    """
    #### Call a function in a thread of its own, because a namespace is of a thread

    The other threads of this process remain where they are.
    """
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(does).result()


def _plug_in(node: int, fd: int, switch: int, mbit: float) -> None:
    """
    #### Connect a node with the switch, at a rate
    """
    limit = f"root tbf rate {mbit}mbit burst {BURST_BYTES} limit {QUEUE_BYTES}"
    _inside(fd, _retransmit_late)
    _configure(fd, "ip", [
        "link set lo up",
        f"link add uplink mtu {MTU_BYTES} type veth "
        f"peer name port{node} mtu {MTU_BYTES} netns {_file_of(switch)}",
        "link set uplink addrgenmode none up",
        f"address add 10.0.0.{node + 1}/24 dev uplink"])
    _configure(fd, "tc", [f"qdisc add dev uplink {limit}"])
    _configure(switch, "ip", [f"link set port{node} addrgenmode none master switch up"])
    _configure(switch, "tc", [f"qdisc add dev port{node} {limit}"])


def _retransmit_late() -> None:
    """
    #### Let TCP send nothing twice that is not lost

    Nothing is ever lost here, but TCP may think so. It sends the end of a transfer again that only
    waits in a queue. It also sends packets again that overtook each other, as they do while other
    programs keep the cores busy. Both would be counted twice. The first needs selective
    acknowledgements, the second a few packets out of order. The settings are of this namespace
    alone.
    """
    settings = Path("/proc/sys/net/ipv4")
    (settings / "tcp_sack").write_text("0")
    (settings / "tcp_reordering").write_text("300")


def _configure(fd: int, program: str, lines: list[str]) -> None:
    """
    #### Let `ip` or `tc` carry out some lines in a namespace
    """
    done = _inside(fd, lambda: subprocess.run(
        [program, "-batch", "-"], input="\n".join(lines), capture_output=True, text=True))
    if done.returncode:
        raise RuntimeError(f"`{program}` cannot carry out {lines}: {done.stderr.strip()}")


def _traffic() -> Traffic:
    """
    #### The count of `uplink` in the namespace of this thread
    """
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    (counters,) = (line.split() for line in lines if line.strip().startswith("uplink:"))
    # Of sent data; eight numbers of received data come first.
    return Traffic(int(counters[9]), int(counters[10]))


def _dropped() -> int:
    """
    #### The packets that the token bucket of `uplink` did not take
    """
    done = subprocess.run(["tc", "-s", "-j", "qdisc", "show", "dev", "uplink"],
                          capture_output=True, text=True, check=True)
    return json.loads(done.stdout)[0]["drops"]


def _file_of(fd: int) -> str:
    """
    #### The path by which another process can open what this one has open
    """
    return f"/proc/{os.getpid()}/fd/{fd}"
