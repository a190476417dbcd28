"""`python -m bytescale`, the same as the `bytescale` command; torchrun starts ranks this way."""

import sys

from bytescale.cli import main

if __name__ == "__main__":
    sys.exit(main())
