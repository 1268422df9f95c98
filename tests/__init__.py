"""Settings of every process of the tests, made before any of them imports torch.

Idle OpenMP threads sleep. By default they spin on cores that other tests and ranks need: one test then took 83 seconds
of processor time and 250 of wall time, instead of 7 and 10. Python's compiled files are kept, even if the user's
environment forbids it: hundreds of ranks and programs import the same modules, which takes 0.35 s longer from source.
"""

import os
import sys

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
