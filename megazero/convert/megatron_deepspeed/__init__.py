"""Checkpoints of Megatron-DeepSpeed with a pipeline, in which BLOOM was trained: a file per layer and tp rank, and
ZeRO's optimizer files.
"""
