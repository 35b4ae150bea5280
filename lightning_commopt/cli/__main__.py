"""``python -m lightning_commopt.cli``."""

import sys

from lightning_commopt.cli.dispatch import main

sys.exit(main())
