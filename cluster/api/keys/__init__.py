"""API keys that operators make, list and revoke while the server serves, and what was used by whom.

    record   a key: its scopes, tenant, limits and end; never the key itself, only its hash
    store    keys and usage in one SQLite file, for all routers of a server
    shared   the same in Redis, for all servers of a cluster
    keys     what a router knows of them, and its exchange with the store
    metrics  requests and tokens by key, for Prometheus
    routes   /v1/organization/admin_api_keys, /v1/organization/usage/completions

Rules: a key is shown once, when it is made. What a router asks of keys it finds in memory; only the
exchange, once a second, waits for the store.
"""
