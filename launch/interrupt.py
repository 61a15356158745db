"""Ctrl-C while a program still imports: it ends without a word, instead of with a traceback from inside a library."""

from __future__ import annotations

import signal


def ends_silently() -> None:
    """Until `is_heard`. A program that ignores interrupts, in a shell's background, still ignores them."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def is_heard() -> None:
    """From here on Ctrl-C is KeyboardInterrupt again: there is something to end in good order."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
