"""`python -m docs.extension`: write anew what the code makes of the pages, and print the files that changed."""

from __future__ import annotations

from docs.extension.made import write

if __name__ == "__main__":
    print("\n".join(write()) or "all pages and drawings are up to date")
