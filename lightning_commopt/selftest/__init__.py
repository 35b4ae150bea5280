"""The laws of the product, to be tested on any cluster: ``commopt doctor --selftest``, and tests/laws."""
