"""Kinds of files that several formats are made of: torch.save's, torch.distributed.checkpoint's, safetensors, each read
without a pickle machine of Python's and written as a stream.
"""
