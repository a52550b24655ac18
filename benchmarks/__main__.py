"""``python -m benchmarks``; see ``python -m benchmarks --help``."""

import sys

from benchmarks.command_line import main

if __name__ == "__main__":
    main(sys.argv[1:])
