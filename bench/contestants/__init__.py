"""The contestants. Each file has `build(work, **settings)`, which builds one kind of trainer and returns `step`.

`step()` makes one optimizer step over one global batch and returns its loss. Peers have the fastest settings of those
that were tried; each file describes them.
"""
