"""`python -m launch +exp=NAME cluster=NAME [key=value ...] [--dry-run]`: the same as experiments/run.py."""

from __future__ import annotations

import sys

from experiments.run import main

if __name__ == "__main__":
    sys.exit(main())
