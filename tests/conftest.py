"""One thread for torch in all tests, whatever the machine's OMP_NUM_THREADS and cores.

The number of threads may change the rounding, and tests compare runs of this process bit by bit with runs of others,
which have one thread. torch reads the variable when it is imported, so this comes first.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"
