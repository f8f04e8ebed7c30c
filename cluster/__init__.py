"""The outermost package: what turns nodes into a running system.

Configuration, the three runtimes (Ray, local, simulated), the controller, the HTTP API and the
command line live here. `cluster` may import every other package; none of them imports it.
"""
