"""The runtime: executes step plans exactly. Rooms: `rings` and `comm` (who sends what to whom), `kernels` and
`attention` (distributed attention), `model` and `loss` (Hugging Face decoders), `states` (FSDP2 model states)."""
