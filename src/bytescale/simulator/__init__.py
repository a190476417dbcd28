"""Simulation: a step plan on a described cluster gives a timeline, its costs and its memory. numpy alone."""
