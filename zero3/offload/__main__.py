"""Run the command line: see `bench.py`."""

from zero3.offload.bench import main

if __name__ == "__main__":
    main()
