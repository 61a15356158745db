"""What all commands have in common: how a script begins, reads its command line and ends."""

from __future__ import annotations

import argparse
import functools
import io
import math
import os
import shlex
import sys
from collections.abc import Callable
from typing import NoReturn, ParamSpec

from launch import interrupt
from launch.errors import UserError
from launch.failure import Diverged, RunFailed
from launch.process import Stopped
from launch.words import manual, one_line, say

LONGEST = 290
"""Characters of a message about bad input."""
READER_LEFT = 128 + 13
"""Exit status, as of a program that SIGPIPE ended."""
Arguments = ParamSpec("Arguments")


def start(main: Callable[[], int]) -> NoReturn:
    """The end of a script's file: runs it. Ctrl-C, which ended it without a word while it imported, is heard from here on."""
    interrupt.is_heard()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # tables hold dashes, which not every terminal's encoding has
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:
        # Who read the output has left, as `| head` does. What is left to say, also at the interpreter's end, nobody hears.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = READER_LEFT
    interrupt.ends_silently()  # all is said; the interpreter takes a second to end, in which a second Ctrl-C may come
    sys.exit(status)


def report_errors(main: Callable[Arguments, int]) -> Callable[Arguments, int]:
    """A command whose errors are one line each and end it with their exit status."""

    @functools.wraps(main)
    def ends_well(*arguments: Arguments.args, **options: Arguments.kwargs) -> int:
        try:
            return main(*arguments, **options)
        except (UserError, RunFailed, Diverged, KeyboardInterrupt, Stopped) as error:
            return report(error)

    return ends_well


def report(error: BaseException) -> int:
    """Tells the user in one line what ended a run, and returns the exit status."""
    if isinstance(error, UserError):
        say(f"error: {one_line(' '.join(str(error).split()), LONGEST)}", sys.stderr)
        return 2
    if isinstance(error, RunFailed | Diverged):  # the latter of a rank that torchrun has started
        say(f"error: {error}", sys.stderr)
        return 1
    if isinstance(error, KeyboardInterrupt):
        say("interrupted: every process of the run has ended", sys.stderr)
        return 130
    if isinstance(error, Stopped):
        say(f"{error}: every process of the run has ended", sys.stderr)
        return error.code
    raise error


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, where argparse prints all flags."""
        raise UserError(f"{message}; --help lists the flags")


def parser(doc: str | None, overrides: str = "") -> argparse.ArgumentParser:
    """Of a command's arguments. doc: the module's docstring, which becomes the help. overrides: the help of key=value
    arguments, which `parse_intermixed_args` takes anywhere; empty: the command has none."""
    made = _Parser(description=manual(doc), formatter_class=argparse.RawDescriptionHelpFormatter)
    if overrides:
        made.add_argument("overrides", nargs="*", metavar="key=value", help=overrides)
    return made


def typed(script: str, arguments: list[str], python: str = "python") -> str:
    """The command line as the user would type it again. python: that of this environment, quoted."""
    return python + " " + shlex.join([f"experiments/{script}.py", *arguments])


def names(option: str | None) -> list[str] | None:
    """The names in an option's value, separated by commas; None where the option was not given."""
    return None if option is None else [name for name in option.split(",") if name]


def numbers(name: str, option: str | None) -> list[float] | None:
    """The numbers in the value of the option --name, separated by commas, each once. Raises UserError."""
    try:
        found = None if option is None else [float(part) for part in option.split(",") if part]
    except ValueError:
        found = [math.nan]
    if found is not None and not all(map(math.isfinite, found)):
        raise UserError(f"--{name}={option}: give numbers, such as 0,1,2")
    return None if found is None else list(dict.fromkeys(found))


def whole(name: str, option: str | None) -> list[int] | None:
    """The same of whole numbers of 0 or more."""
    found = numbers(name, option)
    if found is not None and any(n < 0 or n != int(n) for n in found):
        raise UserError(f"--{name}={option}: give whole numbers, such as 0,1,2")
    return None if found is None else [int(n) for n in found]


def value(text: str) -> int | float | str:
    """A number where `text` is one, else the text."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text
