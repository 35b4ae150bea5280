"""Tests of the methods alone: no process group, one process."""
