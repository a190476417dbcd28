"""Where documents come from: which files there are, and what their records hold, one module a kind of file."""
