"""Going on with a run: from which checkpoint, with what unchanged, and what a checkpoint of a run holds."""
