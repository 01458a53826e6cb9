"""
# The command line of pipelines: draw a schedule
"""

from zero3.pipeline.timeline import main

main()
