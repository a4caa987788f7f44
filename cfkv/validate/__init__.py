"""`cfkv validate`: whether the tables of a run are whole, fit each other, and say what their rows add up to.

Each check is a function from the run's content to a `Check`; polars and numpy do the work, no model is loaded.
"""
