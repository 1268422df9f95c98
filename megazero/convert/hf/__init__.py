"""Hugging Face folders of BLOOM, GPT-2, LLaMA and OPT."""
