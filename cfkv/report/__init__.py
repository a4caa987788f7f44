"""Figures, tables and the self-contained report.html, drawn from a run's tables alone."""
