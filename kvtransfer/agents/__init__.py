"""Transports behind `kvtransfer.agent.Agent`."""
