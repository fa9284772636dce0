"""The exception for mistakes that a user can fix, and how its messages show values."""


class UserError(ValueError):
    """Wrong input, file or setting. The message gives the value, what was expected, and the fix.

    The command-line programs print it as one line, without a traceback, and exit with status 2.
    """


def shown(value: object, *, limit: int = 120) -> str:
    """``repr`` of a value for a message, with the middle left out where it is long."""
    try:
        text = repr(value)
    except ValueError:  # Python prints no integer of more than 4,300 digits
        return "a number too long to print"
    half = limit // 2
    return text if len(text) <= limit else f"{text[:half]}...{text[-half:]}"
