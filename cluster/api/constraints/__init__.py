"""What an output has to match: JSON schemas, regular expressions, grammars and tool calls."""
