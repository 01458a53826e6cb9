"""
# Ranks for tests: real processes, real gloo
"""

from functools import partial

from zero3 import launch

# What every rank imports, imported once.
launch.preload("tests.cases", "tests.survivor")
run = partial(launch.run, device="cpu")
