"""The transports that implement `kvtransfer.agent.Agent`."""
