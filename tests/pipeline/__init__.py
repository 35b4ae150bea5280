"""The parts of pipeline parallelism."""
