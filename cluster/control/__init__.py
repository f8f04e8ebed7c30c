"""The controller: which workers and router processes should live, and where; audits of them.

    controller, workers, routers   the node, and the processes that it wants
    lifecycle, watches             states of a process; who is silent, and for how long
    autoscaling                    what the scaler sees and decides
    weights                        an update goes from worker to worker
    lease                          of several servers one leads
    view, audits                   what it knows, for `/status` and `kvrelay audit`

It is a node like any other: pure, and run by `processes.control_process` or the simulator.
"""
