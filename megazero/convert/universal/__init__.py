"""DeepSpeed's universal checkpoint: a folder per parameter with its whole fp32 value and moments; and the values alone,
as one state dictionary.
"""
