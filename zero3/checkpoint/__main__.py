"""
# The command line of checkpoints: verify and convert
"""

import sys

from zero3.checkpoint.convert import main

sys.exit(main())
