"""``python -m train``; see ``python -m train --help``."""

import sys

from train.shutdown import Shutdown

if __name__ == "__main__":
    # Before the other imports, which take seconds: Ctrl-C in a callback of theirs would be lost.
    with Shutdown() as shutdown:
        from train.command_line import main

        main(sys.argv[1:], shutdown)
