"""FlashInfer's kernels behind the operations of a GPU, where they are asked for and fit the model.

Life: `division.load` imports the package; `division.divide` says, layer by layer, what FlashInfer
computes; `ops.FlashInferOps` calls it for that and leaves the rest to Triton's kernels, from which
it inherits. `ops.fault` runs both once at the start; what fails or differs stays with Triton.
"""
