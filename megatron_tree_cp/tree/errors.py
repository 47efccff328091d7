"""The one exception of bad input."""


class InputError(ValueError):
    """Input that a user must change: its message is one line that says what, where and the fix.

    Command lines print the message on stderr and exit with code 2; nothing is written.
    """
