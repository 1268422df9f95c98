#!/usr/bin/env bash
# Make a virtual environment and install megazero into it:  tools/install.sh VENV EXTRAS
#
#   EXTRAS   extras of pyproject.toml, comma-separated, or nothing
#   PYTHON   interpreter for the environment (default python3)
#   TORCH_INDEX  package index for torch; default: PyTorch's index of CPU builds if there is no NVIDIA GPU and that index
#                answers (PyPI's torch depends on some 3 GB of CUDA libraries), else pip's own
#
# torch is installed first and pinned, so that no later package chooses another version. The script may be run again.
# pip would compile every Python file of every package, most of which nobody imports: 17 s for torch alone. Instead
# `keep` imports what a training imports, and Python keeps the compiled files, even if the user's settings forbid it.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1 extras=${2:-} python=${PYTHON:-python3}
cpu_index=https://download.pytorch.org/whl/cpu

say() { printf '\n== %s\n' "$*"; }

missing=()
command -v "$python" >/dev/null || missing+=(python3)
if command -v "$python" >/dev/null; then
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
        echo "megazero needs Python 3.10 or newer; $python is $("$python" --version 2>&1 | cut -d' ' -f2)." >&2
        echo "Install a newer one and name it:  make PYTHON=python3.11 ..." >&2
        exit 1
    fi
    "$python" -c 'import venv, ensurepip' 2>/dev/null || missing+=(python3-venv)
else
    missing+=(python3-venv)
fi
for program in git make; do
    command -v "$program" >/dev/null || missing+=("$program")
done
if ((${#missing[@]})); then
    echo "Something is missing here. This line installs it:" >&2
    echo "    sudo apt-get update && sudo apt-get install -y ${missing[*]}" >&2
    exit 1
fi

if ! "$venv/bin/python" -c 'import pip' 2>/dev/null; then
    say "1/3 making $venv with $("$python" --version)"
    "$python" -m venv --clear "$venv"
fi

if [ -z "${TORCH_INDEX:-}" ] && ! nvidia-smi >/dev/null 2>&1; then
    answers="import urllib.request; urllib.request.urlopen('$cpu_index/', timeout=5)"
    "$venv/bin/python" -c "$answers" 2>/dev/null && TORCH_INDEX=$cpu_index
fi
index=()
[ -n "${TORCH_INDEX:-}" ] && index=(--extra-index-url "$TORCH_INDEX")

say "2/3 installing torch ($(grep '^torch==' constraints.txt))${TORCH_INDEX:+ with $TORCH_INDEX}: 200 MB for the CPU, 3 GB with CUDA"
"$venv/bin/python" -m pip install --no-compile -c constraints.txt "${index[@]}" torch

keep() { env -u PYTHONDONTWRITEBYTECODE "$venv/bin/python" -c "import $1; print('torch', torch.__version__)"; }
keep "torch.fx.experimental.symbolic_shapes, torch" &>/dev/null & # pip waits for the network meanwhile; numpy is not there yet

say "3/3 installing megazero${extras:+ with $extras}"
"$venv/bin/python" -m pip install --no-compile -c constraints.txt "${index[@]}" -e ".${extras:+[$extras]}"
wait
say "installed in $venv: $(keep "megazero.train.api, torch.fx.experimental.symbolic_shapes, torch")"
