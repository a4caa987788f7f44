"""Signals: one file each, folds over chunks of a teacher-forced pass (see `_base.py` for the contract)."""
