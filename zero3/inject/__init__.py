"""
# Module injection

`from zero3.inject import inject, restore, report, policies`. Read `replace.py` first.
"""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    if name in ("inject", "restore", "report"):
        return getattr(import_module("zero3.inject.replace"), name)
    raise AttributeError(f"module `zero3.inject` has no attribute `{name}`")
