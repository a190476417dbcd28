"""Distributed attention: who needs what (`work`), how it travels (`ring`), how it is computed (`kernels`)."""
