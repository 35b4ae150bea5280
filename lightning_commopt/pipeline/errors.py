"""What cannot be cut into stages."""

__all__ = ["PipelineError"]


class PipelineError(RuntimeError):
    """A model, a step or its data cannot run as a pipeline; the message says what to do instead."""
