"""Which strategy and feature ran where: `pytest --what-runs-where FILE` writes the table of a run.

A module or test says what it shows by a marker of literals:

    pytestmark = pytest.mark.runs("commopt_deepspeed", "stage {stage}", stage=(0, 1, 2, 3))

A word in braces makes a row of each value. A test counts for the one that its parameter of that name has, and for all
of them where it has no such parameter. `{method}` stands for every compression method, and takes a parameter `case`.
`on="cuda"` is for tests that need a GPU.
"""
