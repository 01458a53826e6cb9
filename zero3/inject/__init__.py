"""
# Module injection

`from zero3.inject import inject, restore, report, policies`. Read `replace.py` first.
"""

from zero3.inject.replace import inject, report, restore

__all__ = ["inject", "report", "restore"]
