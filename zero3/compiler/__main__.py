"""
# The command line of the compiler: the graphs of a small model after each pass
"""

from zero3.compiler.model import main

main()
