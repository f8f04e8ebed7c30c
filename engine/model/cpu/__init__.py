"""The decoder's operations on a CPU: compiled kernels, one call for all layers of a step."""
