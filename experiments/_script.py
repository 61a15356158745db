"""What every entry point imports first where it is run as a script: `python experiments/run.py`, from whatever folder.

Imports then come from the repository, not from this folder; and until the program is loaded, Ctrl-C ends it without a word
(`experiments.runs.command.start` has it heard again).
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from launch import interrupt  # noqa: E402

interrupt.ends_silently()
