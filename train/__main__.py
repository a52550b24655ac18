"""``python -m train``; see ``python -m train --help``."""

import sys
from collections.abc import Sequence

from train.processes.shutdown import Shutdown
from train.processes.supervisor import is_one_of_several, supervise


def main(arguments: Sequence[str]) -> None:
    """Runs the command line, ready for signals before the other imports, which take seconds.

    Ctrl-C in a callback of theirs would be printed and forgotten. One of several processes runs in
    a child, whose end its parent explains.
    """
    if is_one_of_several(arguments):
        raise SystemExit(supervise(arguments))
    with Shutdown() as shutdown:
        from train.run import command_line

        command_line.main(arguments, shutdown)


if __name__ == "__main__":
    main(sys.argv[1:])
