# SPDX-License-Identifier: Apache-2.0
"""`python -m sparse_indexer`: the command line."""

import os

# Read by OpenMP when torch loads: threads that wait sleep instead of spinning, which costs nothing
# on an idle machine and a hundred times the demo's time where another process has the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from sparse_indexer.cli import app

app(prog_name="python -m sparse_indexer")
