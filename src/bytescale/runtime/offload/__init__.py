"""Selective activation offloading: what leaves (`offloader`), and where it goes (`tiers`, `disk`, `pinned`)."""
