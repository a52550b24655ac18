"""``python -m train``; see ``python -m train --help``."""

import sys

from train.command_line import main

if __name__ == "__main__":
    main(sys.argv[1:])
