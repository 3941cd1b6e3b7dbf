"""The decode role: reserve blocks, verify received KV, decode in a continuous batch, send token frames."""
