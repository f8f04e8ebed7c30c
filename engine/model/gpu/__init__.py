"""The decoder's operations on a GPU: Triton kernels, cuBLAS, CUDA graphs.

Life: `ops.TritonOps` is made by the runner for a CUDA device; `steps.GpuSteps` warms every kernel
up and captures decode steps as graphs; from then on a step is one copy in, a replay, one copy out.
Under Triton's interpreter (TRITON_INTERPRET=1) the same kernels run on a CPU, for tests.
"""
