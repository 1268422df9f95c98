"""Kinds of files that several formats share: torch.save's, torch.distributed.checkpoint's, safetensors. None of them is
read with `pickle.load`.
"""
