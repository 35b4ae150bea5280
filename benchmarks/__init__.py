"""Long studies: run by hand, their figures recorded in ``benchmarks/README.md``."""
