"""Problem sources: one file each, registered under its stem (see `_base.py` for the contract)."""
