"""A further rank of ``commopt doctor --selftest``, which starts it and tells it all in one JSON object."""

import sys

from lightning_commopt.selftest.processes import be_further_rank

sys.exit(be_further_rank(sys.argv[1]))
