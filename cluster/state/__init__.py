"""Where state is kept that several routers share, or that outlives one: see `router.state`.

Without a store each router has its own memory, and one router may keep its sessions in SQLite
(`cluster.state.session_store`). With one (`cluster.state.redis`) nothing waits for it either: it is
written behind and read ahead, and whatever it loses is told to it again.
"""
