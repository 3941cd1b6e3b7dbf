"""Moving blocks between pools in device memory of one host."""
