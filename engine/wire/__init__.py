"""Messages between processes: MessagePack frames on authenticated sockets."""
