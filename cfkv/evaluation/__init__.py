"""Policies judged: against labels (`offline`), and by the answers that survive a budget (`online`)."""
