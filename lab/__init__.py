"""The laboratory: simulator, replay, profiling, benchmarks. Nothing below it needs it."""
