"""Bubble and memory of a pipeline."""
