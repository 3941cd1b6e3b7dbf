"""Products with weights of 8 bits and fewer."""
