"""How sphinx builds the site: `make docs`, or `python -m sphinx docs build/docs` in the project's folder."""

from __future__ import annotations

from importlib import metadata

project = "megazero"
author = "the megazero developers"
version = release = metadata.version("megazero")
extensions = ["myst_parser", "sphinx.ext.autodoc", "docs.extension.setup"]
exclude_patterns = ["extension/**"]
source_suffix = {".md": "markdown"}

# Markdown: fences with colons for directives, and an anchor for every heading down to the third level.
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

# A name of ours that leads nowhere is an error. Names of other projects lead nowhere here: the build needs no network.
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(torch|numpy|np|collections|os|pathlib|typing|datetime)\b.*")]
nitpick_ignore = [
    ("py:class", name) for name in ("Tensor", "NDArray", "Path", "Any", "Sequence", "Mapping", "Callable")
]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
add_module_names = False

html_theme = "furo"
html_title = "megazero"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
smartquotes = False  # they would make one dash of a flag's two
