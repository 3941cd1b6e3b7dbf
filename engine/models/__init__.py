"""Model code: one parameterised decoder for the families that carry the traffic."""
