"""Checkpoints of Megatron-LM: its own torch files, and those of torch.distributed.checkpoint."""
