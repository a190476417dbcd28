"""Commands on what runs left: their list, their reports, their models."""
