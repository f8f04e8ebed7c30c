"""The router: sends each request to the workers that answer it soonest, and owns its tokens.

    router, models       the node; one router for each of several models
    requests, record     live requests, and what is known of one over all of its attempts
    admission            who may come in, who goes next, what a refusal says
    dispatch, placement  block hashes, the choice in seconds, and what is booked for it
    index                which worker holds which prefix
    sessions, state      conversations, and what routers share
    native               the choice and the index in C, over numbers that Python hands it
    explain, status      why, and how much

Everything but `native` is pure. An attempt is sent all that it needs: workers may lose everything.
"""
