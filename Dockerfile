# An image with megazero, for CPUs or for NVIDIA GPUs:
#
#   docker build -t megazero .
#   docker build -t megazero:cuda --build-arg BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04 --build-arg TORCH_INDEX= --build-arg MEGAZERO_CUDA=8.0,9.0 .
#   docker run --rm megazero python pretrain_gpt.py --train-iters 20
#   docker run --rm --gpus all --ipc host -v /data:/data -v /runs:/runs megazero:cuda torchrun --nproc-per-node 8 pretrain_gpt.py ...
#
# BASE           a Debian or Ubuntu image; for GPUs one with nvcc ("devel"), which compiles kernels for cards that MEGAZERO_CUDA leaves out
# TORCH_INDEX    package index for torch beside PyPI, whose own torch brings the CUDA libraries; empty: PyPI alone
# MEGAZERO_CUDA  compute capabilities to compile CUDA kernels for now
# EXTRAS         extras of pyproject.toml
ARG BASE=python:3.12-slim
FROM ${BASE}

# The compiler stays: kernels that need the installed torch are compiled at first use. The CUDA image brings no Python.
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates g++ $(command -v python3 >/dev/null || echo python3-dev python3-venv) \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1
WORKDIR /megazero

# torch is by far the largest layer, and changes least.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY constraints.txt ./
RUN pip install -c constraints.txt ${TORCH_INDEX:+--extra-index-url $TORCH_INDEX} torch

ARG EXTRAS=chat,sentencepiece,tensorboard
ARG MEGAZERO_CUDA=
COPY LICENSE README.md pyproject.toml setup.py pretrain_gpt.py ./
COPY fused_ops fused_ops
COPY megazero megazero
COPY tools tools
COPY examples examples
# An image runs on other processors than the one that builds it.
RUN MEGAZERO_LEVELS=all pip install -c constraints.txt ${TORCH_INDEX:+--extra-index-url $TORCH_INDEX} -e ".[$EXTRAS]"

# Not root. The home folder holds what is cached: the default corpus, index files, compiled kernels.
RUN useradd --create-home --uid 10001 megazero
USER 10001
CMD ["python", "pretrain_gpt.py", "--help"]
