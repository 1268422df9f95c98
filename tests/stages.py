"""The ZeRO stages of the tests of model state, resumes and numerical faults: a new stage is an entry here."""

STAGES = (0, 1, 2, 3)
SHARDED_GRADIENTS = STAGES[2:]
"""The stages that reduce after every micro-batch."""
