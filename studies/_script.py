"""What every study imports first where it is run as a script: see experiments/_script.py."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from experiments import _script  # noqa: E402, F401
