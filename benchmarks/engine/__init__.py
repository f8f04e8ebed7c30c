"""Measures one engine without a server: kernels, steps, number formats."""
