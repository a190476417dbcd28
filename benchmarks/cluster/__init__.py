"""Strategies in wall time on a small cluster that one machine holds: slow hosts, shaped links, real training runs."""
