"""Counterfactual labels: one file per kind, over one replay engine (`_replay.py`)."""
