"""``python -m models``; see ``python -m models --help``."""

import sys

from models.command_line import main

if __name__ == "__main__":
    main(sys.argv[1:])
