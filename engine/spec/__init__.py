"""What a model is, as plain values from its config.json: layers, attention, experts, states, and the format of each module."""
