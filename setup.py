"""What is installed: two packages and the training script. Names, versions and dependencies stand in pyproject.toml.

Nothing but setuptools may be imported here: pip builds in an environment of its own that has no torch.
"""

from setuptools import find_packages, setup

setup(packages=find_packages(include=["megazero", "megazero.*", "fused_ops", "fused_ops.*"]), py_modules=["pretrain_gpt"])
