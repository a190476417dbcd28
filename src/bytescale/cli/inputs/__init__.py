"""Commands on what runs are made from: their data."""
