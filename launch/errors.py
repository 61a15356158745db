"""The one exception that means "the user can mend this": printed as one line, exit code 2, no traceback."""

from __future__ import annotations


class UserError(Exception):
    """Bad input. The message is a single line that says what is wrong and what would be right."""
