"""When a worker changes its role: observation, pressures, policy, and the loop that carries moves out."""
