"""What a model's text means: reasoning, content and tool calls, read while it is generated."""
