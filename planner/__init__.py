"""The planner moves workers between roles: observation, pressures, policy, and the loop that carries moves out."""
