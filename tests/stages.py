"""The ZeRO stages of the tests of model state, resumes and numerical faults: a new stage is an entry here."""

STAGES = (0, 1, 2, 3)
