"""The one kind of error that a user's input can cause."""


class InputError(Exception):
    """Bad input. Its text is one clear line that names the file, the field and the remedy.

    Programs print it to standard error and exit with status 2.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))
