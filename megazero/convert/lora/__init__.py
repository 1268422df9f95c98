"""Adapters: checkpoints of LoRA runs merged where they are read, and PEFT's folders."""
