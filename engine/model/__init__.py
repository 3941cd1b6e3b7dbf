"""The model: families read a config.json into a spec, layer kinds compute it, parameters declare the weights."""
