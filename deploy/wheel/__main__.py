"""`python -m baton_serve` is `baton`."""

import sys

from baton_serve import main

if __name__ == "__main__":
    sys.exit(main())
