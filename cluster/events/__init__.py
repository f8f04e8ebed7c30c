"""KV events for others: what the workers hold, for routers that are not ours, in vLLM's form.

* `held`: which blocks are published, of whom, and in what order changes go out; no thread, no clock
* `form`: events and batches as vLLM encodes them
* `section`: the settings
* `publisher`: the sockets, the thread that owns them, and what a router hands over to it
"""
