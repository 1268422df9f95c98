"""Threads of OpenMP that have nothing to do sleep: they turn in a busy loop otherwise, on cores that other tests and ranks need.

Set before torch is imported, which loads OpenMP. One test took 83 seconds of processor time and 250 by the clock, where it takes 7 and 10.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
