"""Who takes part: each file builds one kind of trainer, `build(work, **settings)`, which returns a function that runs
one step.

`step()` does one optimizer step over one global batch and returns its loss, so that nothing is left running. Peers have
the settings that were fastest of those tried; what they are, their file says.
"""
