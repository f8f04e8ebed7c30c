"""A worker whatever its role: its node, its exchange with other workers, and its process.

    node                 receives messages, runs the engine's core, answers; pure
    spec, build          from settings to a worker that runs
    kv_plan, model_plan  how many blocks and sequences fit
    transfers, host_tier, left_kv, stored_kv   its exchange, put together
    process, threads     its event loop and the threads beside it
    guardian, fork_server, processes, rank_host   who starts and watches it, and its ranks

The node never waits: what takes time is an effect, whose end is a message.
"""
