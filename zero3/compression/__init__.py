"""
# Compression

`from zero3.compression import compress, clean, read, write, distill, Quantize, Prune`. Read
`rules.py` first.
"""

from zero3.compression.clean import clean, read, write
from zero3.compression.compress import compress
from zero3.compression.distill import distill
from zero3.compression.rules import Prune, Quantize

__all__ = ["Prune", "Quantize", "clean", "compress", "distill", "read", "write"]
