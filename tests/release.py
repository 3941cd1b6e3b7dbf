"""The last release: what an upgrade must work beside, and whose numbers may only fall."""

NAME = "0.1.0"
COMMIT = "4ca74cc9c311"
