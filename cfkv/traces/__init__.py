"""Traces: generated, restated from worked solutions, or imported; segmented and graded."""
