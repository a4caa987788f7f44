"""Models: the only package that imports transformers."""
