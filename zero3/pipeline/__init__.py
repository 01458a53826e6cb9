"""
# Pipelines

`from zero3.pipeline import Pipeline`. Read `schedules.py` first.
"""

from zero3.pipeline.pipeline import Pipeline

__all__ = ["Pipeline"]
