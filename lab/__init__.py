"""The laboratory: simulator, replay, profiling, benchmarks. Nothing below it needs it.

    sim         `kvrelay fuzz`: production's nodes in virtual time, faults by seed, checkers
    replay      `kvrelay replay`: traffic on clusters of any size
    timing, profiling   what passes cost on a machine, measured or by its roofline
    bench       load against a server

A checker that bites has a breakage: production code with one safeguard taken out, and a seed.
"""
