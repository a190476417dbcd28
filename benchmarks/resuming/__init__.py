"""Runs that are killed, moved to other ranks and resumed, through the real command line."""
