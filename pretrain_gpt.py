#!/usr/bin/env python3
"""Pretrain a GPT-, BLOOM- or LLaMA-shaped model: `torchrun --nproc-per-node N pretrain_gpt.py --tp T --pp P ...`.

The same as `megazero pretrain`.
"""

import sys

from megazero.cli.pretrain import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
