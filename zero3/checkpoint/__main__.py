"""
# The command line of checkpoints: inspect, verify, convert
"""

import sys

from zero3.checkpoint.convert import main

sys.exit(main())
