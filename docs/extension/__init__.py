"""What makes parts of the pages from the code. `setup` is the extension that sphinx loads; options, docstrings and
drawings do without sphinx.
"""
