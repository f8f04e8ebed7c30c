"""The one error that a user of a model sees."""


class ModelError(Exception):
    """The model cannot be used. The text is one line: what is wrong, with its value, and what would
    be right."""
