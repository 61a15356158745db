"""For all tests: Ctrl-C reaches the processes that they start, also where pytest itself runs in a shell's background."""

from __future__ import annotations

import signal

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as a background job inherits it, and would hand it on
    signal.signal(signal.SIGINT, signal.default_int_handler)
