"""The one exception type for mistakes that a user can mend."""


class UserError(ValueError):
    """Wrong input, file or setting. The message gives the value, what was expected, and the fix.

    The command-line programs print it as one line, without a traceback, and exit with status 2.
    """
