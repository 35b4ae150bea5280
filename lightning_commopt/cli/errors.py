"""What a person has to change."""

__all__ = ["UsageError"]


class UsageError(ValueError):
    """A command cannot do what was asked. One sentence that says what to do instead; the exit code is 2."""
