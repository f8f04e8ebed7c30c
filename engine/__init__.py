"""The engine: what a worker is made of, independent of its role.

    request, service_class, needs, shares      what a request is: one vocabulary
    plug, adapters, weights, support           capabilities, their hooks, and where each works
    core, sequence, scheduling                 sequences, steps, and who is in the next one
    kv                                         blocks, their names, groups and windows; events
    cost, waiting, stats, messages             what workers publish, and what they are asked
    model                                      a step becomes tokens: checkpoint, cpu, gpu, parallel
    native, prebuilt                           C beside Python: compiled here, or in the wheel
    node, host, wire                           processes that talk; they know nothing of models
    config, settings, identity, files, logs    what a process starts with

Everything but `model`, `host` and `wire` is pure: no clock, no socket, no thread, no torch. Nothing
here imports another package of KVRelay.
"""
