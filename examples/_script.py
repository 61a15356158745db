"""What every example does first when it is run as a script: one line instead of a traceback.

That line says what to do where a package is missing, and without torchrun. `birder` comes from this clone, installed or not.
A copy of an example does not need this file: remove its two lines.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from experiments import _script  # noqa: E402
from launch import interrupt  # noqa: E402
from launch.words import manual, say  # noqa: E402

interrupt.is_heard()
main = sys.modules["__main__"]
asks = bool({"-h", "--help"} & set(sys.argv[1:]))
if asks and not hasattr(main, "argparse"):  # those that have options have their own help
    print(manual(main.__doc__))
    raise SystemExit(0)
if importlib.util.find_spec("torch") is None:
    _script.lacks("torch")
if "RANK" not in os.environ and not asks:
    torchrun = "torchrun" if shutil.which("torchrun") else f"{sys.executable} -m torch.distributed.run"
    say(f"error: start it with torchrun:\n  {torchrun} --nproc-per-node 2 {shlex.join(sys.argv)}", sys.stderr)
    raise SystemExit(2)
