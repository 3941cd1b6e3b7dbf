"""What a model wrote, as a message: content, reasoning and tool calls, by tables of formats."""
