"""`python -m launch +exp=NAME cluster=NAME [key=value ...] [--dry-run]`: the same as experiments/run.py."""

from __future__ import annotations

import runpy
from pathlib import Path

if __name__ == "__main__":
    # By its path, not as a module: the launchers know nothing of the harness that they start.
    runpy.run_path(str(Path(__file__).resolve().parents[1] / "experiments" / "run.py"), run_name="__main__")
