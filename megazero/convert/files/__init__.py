"""Kinds of files that several formats share: torch.save's, torch.distributed.checkpoint's, safetensors. None is
unpickled by Python's own rules.
"""
