"""
# Compression

`from zero3.compression import compress, clean, read, write, distill, Quantize, Prune`. Read
`rules.py` first.
"""

from zero3.compression.clean import clean as clean
from zero3.compression.clean import read as read
from zero3.compression.clean import write as write
from zero3.compression.compress import compress as compress
from zero3.compression.distill import distill as distill
from zero3.compression.rules import Prune as Prune
from zero3.compression.rules import Quantize as Quantize
