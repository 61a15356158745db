"""The one exception that means "the user can mend this": printed as one line, exit code 2, no traceback."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class UserError(Exception):
    """Bad input. The message is a single line that says what is wrong and what would be right."""


@contextlib.contextmanager
def refused(what: str, *kinds: type[Exception], way_on: str = "") -> Iterator[None]:
    """Exceptions of these kinds as UserError: what was given does not suit `what`. Empty: they say themselves what.

    Said on one line: of the system's own errors what went wrong, of one without words its kind. way_on: what would help.
    """
    try:
        yield
    except UserError:
        raise
    except kinds as error:
        said = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
        raise UserError((f"{what}: {said}" if what else said) + f"; {way_on}" * bool(way_on)) from error
