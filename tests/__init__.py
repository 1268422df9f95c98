"""What holds for every process of the tests, set before any of them imports torch.

Threads of OpenMP that have nothing to do sleep: they turn in a busy loop otherwise, on cores that other tests and ranks
need. One test took 83 seconds of processor time and 250 by the clock, where it takes 7 and 10. And what Python has
compiled is kept, even where the user keeps nothing: hundreds of ranks and programs import the same modules, which takes
each 0.35 s longer from source.
"""

import os
import sys

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
