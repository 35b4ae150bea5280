"""Tests of measuring, predicting and choosing."""
