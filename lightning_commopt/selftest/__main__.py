"""A further rank of ``commopt doctor --selftest``, which starts it and tells it all in one JSON object."""

import json
import sys

from lightning_commopt.selftest.processes import be_further_rank

be_further_rank(**json.loads(sys.argv[1]))
