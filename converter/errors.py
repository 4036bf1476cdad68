"""The one exception of a conversion that cannot be done."""


class ConversionError(Exception):
    """The source, the target or an option is unusable; the message is one sentence for the user."""
