"""The model: a checkpoint on disk becomes a function from a step to sampled tokens.

`resolve` finds the checkpoint, `config` describes it (`families` reads each family's own spelling),
`weights` loads it, `decoder` runs it on one of three sets of operations (`torch_ops`, `cpu_ops`,
`gpu`), `sampler` picks tokens, and `runner` ties them together.
`resolve` and `config` never import torch, so that a control process can use them at once.
"""
