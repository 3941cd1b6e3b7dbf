"""The generation role: reserve room, verify received KV, decode in a continuous batch, send token frames."""
