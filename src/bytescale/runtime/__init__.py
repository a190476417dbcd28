"""The runtime: executes step plans exactly.

`rings` and `comm` decide who sends what to whom, `kernels` and `attention` are distributed attention, `model`,
`support` and `loss` wrap Hugging Face decoders, `states` keeps the model states (FSDP2). `offload` moves activations
away and back, `profiler` measures the machine.
"""
