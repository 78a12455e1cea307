"""Chat tasks: messages and tool calls over exact tokens."""
