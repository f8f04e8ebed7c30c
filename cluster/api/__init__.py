"""The HTTP API: the only package that speaks HTTP as a server.

Life of a call: `body` reads it (bounded), `schema` checks it, `tokenizer` turns it into token ids
in a thread, `generation` submits one request per choice through `client.RouterClient`, turns the
tokens that come back into text, and `respond` sends them, whole or as server-sent events. A client
that goes away cancels what it asked for.

It needs the router's messages, and of `cluster` only two modules of data, its settings
(`cluster.config`) and its status (`cluster.status`). Whatever asks or changes the cluster is given
to it as functions, in `context.ApiContext`.
"""
