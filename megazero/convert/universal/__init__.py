"""DeepSpeed's universal checkpoints, a folder per parameter with its fp32 value and moments; and consolidated weights,
the values alone in one state dictionary.
"""
