"""Turns nodes into a running system: configuration, processes, HTTP API, controller, commands.

    config, config_checks   settings: each with a default, a type and a range
    api                     HTTP, and nothing else of it anywhere
    control, scaling        which workers should live, and how many: pure
    processes               supervisor, controller, routers, and Ray (in `ray*` alone)
    events                  what workers hold, for routers of others, as vLLM publishes it
    state                   what outlives them: SQLite, Redis, the lease of the leader
    cli, doctor, hosts      commands; what is wrong with a machine; machines by ssh
    orders                  what operators may order of a server, and who obeys
    status                  what `/status`, metrics, console and commands show

It may import every package below it; only `lab`, which measures and simulates, imports it.
"""
