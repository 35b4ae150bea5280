"""Tests of lightning_commopt.

The folder is a package: helpers are imported as `tests.pool`, and a function of a test module travels to the workers of
the pool as `tests.test_x.function`.
"""
