"""The one exception of this folder that is meant for the user's eyes."""


class DataError(ValueError):
    """A user's mistake in one line: what and where, what is allowed, the fix. Commands print it and exit with 2."""
