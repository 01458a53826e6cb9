"""Run the command line: see `bench.py`."""

from zero3.offload.bench import main

main()
