"""Typed configuration (`schema`) and its TOML form with overrides (`toml`)."""
