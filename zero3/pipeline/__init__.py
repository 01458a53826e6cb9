"""
# Pipelines

`from zero3.pipeline import Pipeline`. Read `schedules.py` first.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    # `python -m zero3.pipeline` draws schedules, and needs no model for that.
    if name == "Pipeline":
        from zero3.pipeline.pipeline import Pipeline
        return Pipeline
    raise AttributeError(f"module `zero3.pipeline` has no attribute `{name}`")
