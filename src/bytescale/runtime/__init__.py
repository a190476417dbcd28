"""How a plan is executed, exactly.

`world` knows the ranks and their groups, `p2p` moves data between them, `attention` is distributed attention, `model`
wraps Hugging Face decoders, `fsdp` keeps the model states, `pipeline` runs a stage, `offload` moves activations away
and back.
"""
