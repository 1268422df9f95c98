"""How sphinx builds the site: `make docs`, or `python -m sphinx docs build/docs` in the project's folder."""

from __future__ import annotations

import re
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "megazero" / "__init__.py"

project = "megazero"
author = "the megazero developers"
# The version is read and not imported: the site is built without megazero and torch.
(version,) = re.findall(r'^__version__ = "(.*)"', PACKAGE.read_text(), re.M)
release = version
extensions = ["myst_parser", "sphinx_copybutton", "docs.extension.setup"]
exclude_patterns = ["extension/**"]
source_suffix = {".md": "markdown"}

# An anchor for every heading down to the fourth level.
myst_heading_anchors = 4

# What a shell prints before a command is not copied.
copybutton_prompt_text = r"\$ |>>> "
copybutton_prompt_is_regexp = True

html_theme = "furo"
html_title = "megazero"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
smartquotes = False  # they would make one dash of a flag's two
