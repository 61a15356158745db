"""The one exception that means "the user can mend this": printed as one line, exit code 2, no traceback."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class UserError(Exception):
    """Bad input. The message is a single line that says what is wrong and what would be right."""


@contextlib.contextmanager
def refused(what: str, *kinds: type[Exception]) -> Iterator[None]:
    """Exceptions of these kinds as UserError: what was given does not suit `what`. Empty: they say themselves what."""
    try:
        yield
    except kinds as error:
        raise UserError(f"{what}: {error}" if what else str(error)) from error
