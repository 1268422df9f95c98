#!/usr/bin/env bash
# Put into a virtual environment what the documentation's site needs:  tools/install_docs.sh VENV
#
#   PYTHON   interpreter for a new environment (default python3)
#
# The pages are plain Markdown, so the site needs sphinx and neither megazero nor torch. An environment that has these
# packages stays as it is, whatever else is installed in it.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1

if "$venv/bin/python" -c 'import sphinx, myst_parser, furo, sphinx_copybutton' 2>/dev/null; then
    exit
fi
if ! "$venv/bin/python" -c 'import pip' 2>/dev/null; then
    "${PYTHON:-python3}" -m venv --clear "$venv"
fi
# The packages of the extra `docs` alone: pip installs an extra together with its project.
IFS=, read -ra packages <<<"$(sed -n 's/^docs = \[\(.*\)\]$/\1/p' pyproject.toml | tr -d '" ')"
"$venv/bin/python" -m pip install -c constraints.txt "${packages[@]}"
