"""The documentation: pages, and the extension that makes parts of them from the code. `make docs` builds it."""
