"""
# The command line of whole models: two steps of a small one
"""

from zero3.whole_model.wrap import main

main()
