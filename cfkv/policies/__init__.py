"""Policies: one file each, a pure score over the cache seen as a table (see `_base.py` for the contract)."""
