"""
# How the tests run: the longest files first, and what runs is said

`make test` gives each file to one of the processes that run side by side, because its tests share
what they recorded once.
"""

import contextlib
import fcntl
import gc
import os
import pickle
import sys
import time

import pytest

# A long file that begins last would keep one process busy while the others have nothing to do.
# `test_restarts` mostly waits, so it runs beside the file that computes most.
LONGEST = ("test_compiler", "test_restarts", "test_job", "test_activations", "test_notebooks",
           "test_links", "test_links_bytes", "test_tiers", "test_wrap", "test_stage3",
           "test_together", "test_whole", "test_groups", "test_bench", "test_site", "test_pipeline",
           "test_mutations", "test_streams", "test_dcp", "test_stages_bytes", "test_equality",
           "test_stages_checkpoint", "test_clusters", "test_fraction", "test_tensor_parallel",
           "test_away", "test_combinations", "test_survival", "test_save_load", "test_trainer",
           "test_cases", "test_gradients", "test_nodes", "test_calculator", "test_compression",
           "test_compressed", "test_native", "test_readme", "test_stopped", "test_exercises")


def pytest_collection_modifyitems(items):
    """
    ## Begin with the files that take longest, and skip what needs more GPUs than there are
    """
    def place(item):
        name = item.path.stem
        return LONGEST.index(name) if name in LONGEST else len(LONGEST)

    items.sort(key=place)
    for item in items:
        if marker := item.get_closest_marker("gpu"):
            import torch

            needed = marker.args[0] if marker.args else 1
            item.add_marker(pytest.mark.skipif(
                torch.cuda.device_count() < needed,
                reason=f"needs GPUs: {needed}; they are hidden except with exactly `-m gpu`"))


def pytest_collection_finish():
    """
    ## Ranks import once what the files that have been collected import

    What is alive now stays, so the collector of cycles need not look at it each time.
    """
    gc.collect()
    gc.freeze()
    gc.enable()
    # Tests without ranks need not import torch for it.
    if "tests.ranks" in sys.modules:
        sys.modules["tests.ranks"].preload()


@pytest.fixture(scope="session")
def once(tmp_path_factory):
    """
    ## What several files need is recorded once, whichever process gets there first

    `once(name, make)` returns what `make()` has returned in one of the processes.
    """
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        # The folder of all processes that run side by side.
        folder = folder.parent

    def recorded(name, make):
        with open(folder / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            path = folder / f"{name}.recorded"
            if not path.exists():
                path.write_bytes(pickle.dumps(make()))
            return pickle.loads(path.read_bytes())

    return recorded


def pytest_configure(config):
    """
    ## Say which file begins, and when; and let a rank that has sent something compute on

    Dots alone would leave a log without a word for a minute.
    """
    keep_the_core()
    if config.option.markexpr != "gpu":
        # The other tests, and all that they start, are about processes on the CPU.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # What the tests' files import stays. Until all are imported, the collector of cycles would look
    # at it again and again.
    gc.disable()
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Progress(config))


def keep_the_core():
    """
    ## Processes of the tests do not take the core from each other as soon as they wake up

    There are more ranks than cores. A rank that sends something wakes another rank, which would
    take its core at once, often while the sender still has the lock of gloo's connection. Until it
    gives that up, gloo's thread asks for it again and again, and keeps a core busy with nothing:
    with two cores, a quarter of the time. The system's policy for batches lets a process use up
    its slice of time first. All processes that the tests start inherit it.
    """
    # Only Linux has it, and not every container permits it. It saves time and proves nothing.
    with contextlib.suppress(AttributeError, OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


class Progress:
    """
    ## A line for each file, at its first test
    """

    def __init__(self, config):
        self.config, self.began_s, self.files = config, time.monotonic(), set()

    def pytest_runtest_logstart(self, nodeid):
        file = nodeid.partition("::")[0]
        if file in self.files:
            return
        self.files.add(file)
        reporter = self.config.pluginmanager.get_plugin("terminalreporter")
        if reporter.verbosity == 0:
            minutes, seconds = divmod(int(time.monotonic() - self.began_s), 60)
            reporter.ensure_newline()
            reporter.write_line(f"{minutes:2}:{seconds:02} {file}")
