"""The one exception that carries a message meant for the person at the keyboard."""


class InputError(ValueError):
    """Something the user gave cannot be honoured.

    The message is a paragraph that says what is wrong, the values seen, and what to do about it. The command line
    prints it and exits with code 2; every other exception is a bug and keeps its traceback.
    """
