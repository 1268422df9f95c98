"""The layers of a model: what a user writes for layers that differ, and what each computes."""
