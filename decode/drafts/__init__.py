"""Drafters: tokens that may follow a sequence, guessed on the host; verification never lets a guess change a text."""
