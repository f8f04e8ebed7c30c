"""The HTTP API: the only package that speaks HTTP as a server.

    app, server, http            routes, connections and their bounds
    database                     SQLite files of what is kept
    incoming, limiter, tenants   who calls, what they may, and their share of what is limited
    keys                         keys that operators make, and what was used by whom
    openai, anthropic, responses, batches   the APIs, over the same plans and pieces
    text, output, constraints    tokens and text, what models say, and what they may say
    client, calls, explain       to the router and back; what became of a call
    utility                      models, adapters, weights, tokens, documents
    metrics, cluster_metrics, operations, console   what operators see

Life of a call: `incoming` reads it (bounded), `schema` checks it, `tokenizer` makes token ids of it
in a thread, `generation` submits one request per choice through `client.RouterClient`, turns the
tokens that come back into text, and `respond` sends them, whole or as server-sent events. A client
that goes away cancels what it asked for.

It needs the router's messages, and of `cluster` only modules of data: its settings
(`cluster.config`), what operators order (`cluster.orders`) and its status (`cluster.status`).
Whatever asks or changes the cluster is given to it, in `context.ApiContext`.
"""
