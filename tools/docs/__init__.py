"""Pages of `docs/reference/` that are made from the code, one module per page: `python -m tools.docs`, or `make docs`.

tools.docs.keys.page()  ->  the text of docs/reference/keys.md
"""
