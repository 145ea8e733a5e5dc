"""`python -m nanovllm` is the `nanovllm` command."""

import sys

from nanovllm.cli import main

if __name__ == "__main__":
    sys.exit(main())
