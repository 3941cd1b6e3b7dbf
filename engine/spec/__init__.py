"""The description of a model, as plain values from its config.json: layers, attention, experts, states, formats of modules."""
