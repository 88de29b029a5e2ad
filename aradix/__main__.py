"""`python -m aradix`: the `aradix` command."""

import sys

from aradix.cli import main

if __name__ == "__main__":
    sys.exit(main())
