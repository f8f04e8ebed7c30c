"""Every interpreter of a scripted server imports this: a router's answers as the script says."""

import sys

if "router" in sys.orig_argv and "kvrelay.cluster.processes.child" in sys.orig_argv:
    from tests.agents import scripted

    scripted.use_script()
