"""Moving KV blocks between workers, correctly: read, then confirm; check, then use.

    messages, peer       handoffs and fetches between two workers: tables of states, leases
    tiers                host memory, disk and object store below a worker's own blocks
    agent, movers        who copies bytes: NIXL, files, the object store; `copy`, then `poll`
    executor, transfer_loop   the thread that asks movers and tells nodes what has settled
    store                what outlives a worker: arenas, disk index, buckets
    checksum, codec, kivi, layout   bytes: compared, made smaller, and where they lie

`peer` and `tiers` are pure. A block is freed only once no transfer can write to it, and used only
once its checksum was compared.
"""
