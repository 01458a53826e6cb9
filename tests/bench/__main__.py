"""
# `python -m tests.bench`
"""

from tests.bench.training import main

if __name__ == "__main__":
    main()
