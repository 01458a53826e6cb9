"""
# The command line of the estimate
"""

from zero3.estimate.formulas import main

main()
