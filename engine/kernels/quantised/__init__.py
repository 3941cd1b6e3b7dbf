"""Products with quantised weights of 8 bits and fewer."""
