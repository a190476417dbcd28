"""The paper's figures, computed: each module gives rows of ours beside the published numbers."""
