"""Tests of the command ``commopt``."""
