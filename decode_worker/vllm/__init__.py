"""A worker that computes with vLLM: the messages of ours on one side, vLLM's own interface on the
other.

Routers see a worker like any other: it takes `Decode`, sends `TokenDeltas` a step, and announces
which blocks it holds. Its process runs in the virtual environment that has vLLM, from this source.
An adapter for another engine needs what `engine` does here, and nothing else of it: begin a request
of token ids, stop one, run a step, and say after each step which tokens came, which blocks were
stored and removed, and how full it is. `node` decides, and knows no vLLM. How it is built: ADR 59.
"""
