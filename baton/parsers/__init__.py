"""What a model's text means: reasoning, tool calls, content. State machines without I/O."""
