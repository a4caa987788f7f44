"""Statistics on tables: which signals agree with the labels, and how sure that is. Imports no torch."""
