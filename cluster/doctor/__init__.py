"""What is wrong with a machine or a server, and what to do about it: `kvrelay doctor`."""
