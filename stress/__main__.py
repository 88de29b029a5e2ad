"""`python -m stress`."""

from __future__ import annotations

import sys

from stress.cli import main

if __name__ == "__main__":
    sys.exit(main())
